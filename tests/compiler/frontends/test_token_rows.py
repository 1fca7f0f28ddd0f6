"""Rows without a token are cut at the door: they are never generated, drafted or taken in a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_models

from flexspec.compiler.frontends.open_model import open_model
from flexspec.compiler.frontends.token_rows import first_rows, without_padding
from flexspec.draft_plan import DraftPlan
from flexspec.errors import CompileError, RequestError
from flexspec.kernels.cpu.build import supported_isas
from flexspec.kernels.package.compile_model import compile_model
from flexspec.kernels.package.options import CompileOptions
from flexspec.kernels.package.pairing import check_pairing
from flexspec.runtime.open.engine import open_engine
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.sampling import SamplingParams
from flexspec.types import DType

TOKENS = len(tiny_models.byte_level_tokens())


def folder(tmp_path: Path, name: str, rows: int, *, seed: int = 0, tokenizer: bytes | None = None) -> Path:
    """A model of so many rows with the tokenizer of the tiny GGUF file."""
    if tokenizer is None:
        gguf = tiny_models.write_gguf(tmp_path / "plain.gguf", tiny_models.random_weights(TOKENS))
        tokenizer = open_model(gguf).tokenizer_json
    assert tokenizer is not None
    made = tiny_models.write_huggingface(tmp_path / name, tiny_models.random_weights(rows, seed=seed))
    (made / "tokenizer.json").write_bytes(tokenizer)
    return made


def test_rows_behind_the_last_token_are_cut(tmp_path: Path) -> None:
    path = folder(tmp_path, "wide", TOKENS + 60)
    whole, cut = open_model(path), without_padding(open_model(path))
    assert (whole.config.vocab_size, cut.config.vocab_size) == (TOKENS + 60, TOKENS)
    rows = cut.weights.get("embed_tokens.weight")
    assert rows.shape == cut.weights.shape("embed_tokens.weight") == (TOKENS, tiny_models.HIDDEN)
    np.testing.assert_array_equal(rows, whole.weights.get("embed_tokens.weight")[:TOKENS])
    assert cut.weights.shape("norm.weight") == whole.weights.shape("norm.weight")


def test_an_ssm_of_a_padded_vocabulary_belongs_to_an_llm_without(tmp_path: Path) -> None:
    llm = without_padding(open_model(folder(tmp_path, "llm", TOKENS)))
    check_pairing(llm, [first_rows(open_model(folder(tmp_path, "ssm", TOKENS + 64)), TOKENS)])


def test_permuted_tokens_are_refused_by_the_first_id(tmp_path: Path) -> None:
    llm = open_model(folder(tmp_path, "llm", TOKENS))
    table = json.loads(llm.tokenizer_json or b"")
    vocab = table["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    ssm = open_model(folder(tmp_path, "ssm", TOKENS, tokenizer=json.dumps(table).encode()))
    with pytest.raises(CompileError, match=f"id {vocab['b']} is another token"):
        check_pairing(llm, [ssm])


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_no_row_without_a_token_is_generated(tmp_path: Path, temperature: float) -> None:
    wide, ssm = folder(tmp_path, "wide", TOKENS + 60), folder(tmp_path, "ssm", TOKENS + 60, seed=1)
    options = CompileOptions(DType.F32, isas=supported_isas()[:1], draft=DraftPlan.parse("tree:2,2/sources=ssm"))
    artifact, _ = compile_model(wide, [ssm], tmp_path / "wide.fspec", options, argv=["flexspec"])
    params = [SamplingParams(max_tokens=32, temperature=temperature, seed=i) for i in range(8)]
    told = []
    for draft in ("off", "tree:2,2/sources=ssm"):
        served = open_engine(artifact, ServeOptions(draft=draft, threads=1, context_tokens=0, measure=False))
        tokens: list[list[int]] = [[] for _ in params]
        for i, one in enumerate(params):
            served.engine.submit([50 + i, 60], one, lambda delta, to=tokens[i]: to.extend(delta.token_ids))
        while served.engine.step():
            pass
        assert max(map(max, tokens)) < TOKENS
        with pytest.raises(RequestError, match="token id 300"):
            served.engine.check([300], params[0])
        for executor in served.executors:
            executor.close()
        told.append(tokens)
    assert told[0] == told[1]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_an_end_token_that_is_known_by_name_only(tmp_path: Path, file: str) -> None:
    path = folder(tmp_path, "named", TOKENS)
    config = json.loads((path / "config.json").read_text())
    for key in ("eos_token_id", "bos_token_id"):
        config.pop(key, None)
    (path / "config.json").write_text(json.dumps(config))
    assert open_model(path).config.eos_ids == ()
    (path / file).write_text('{"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}}')
    model = open_model(path)
    assert (model.config.eos_ids, model.config.bos_id) == ((2,), 1)
    assert model.special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
