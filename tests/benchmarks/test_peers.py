"""Peers are measured fairly: same weights in every format, same token ids, pooled rates, no nonsense counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_models import byte_level_tokens, random_weights, write_gguf

from benchmarks.peers.prepare import prepare, read_prompts
from benchmarks.peers.run import is_sane, summarise
from benchmarks.peers.worker import Job, generate
from flexspec.compiler.frontends.open_model import open_model
from flexspec.runtime.text.tokenizer import Tokenizer
from flexspec.weight_formats.bf16 import to_bf16_bits

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl"
CATEGORIES = {
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    *("translation", "summarization", "qa", "math_reasoning", "rag"),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], Tokenizer]:
    folder = tmp_path_factory.mktemp("peers")
    source = write_gguf(folder / "tiny.gguf", random_weights(len(byte_level_tokens())))
    return prepare(source, PROMPTS, folder / "prepared", count=3)


def test_bf16_rounds_like_the_gguf_package() -> None:
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    values[:3] = [1.00390625, 1.01171875, -0.0]  # two ties and a signed zero
    theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
    np.testing.assert_array_equal(to_bf16_bits(values), theirs.view(np.uint16).reshape(-1))


def test_all_formats_hold_the_same_weights(prepared: tuple[dict[str, Path], Tokenizer]) -> None:
    paths, _ = prepared
    from_gguf, from_folder = open_model(paths["gguf"]), open_model(paths["huggingface"])
    assert from_gguf.config == from_folder.config
    names = set(from_folder.weights.names())
    assert names == set(from_gguf.weights.names())
    for name in names:
        ours = from_gguf.weights.get(name)
        expected = to_bf16_bits(ours) if ours.ndim == 1 else (ours.view(np.uint32) >> 16).astype(np.uint16)
        np.testing.assert_array_equal(to_bf16_bits(from_folder.weights.get(name)), expected, err_msg=name)


def test_prompts_reach_the_peers_as_ids(prepared: tuple[dict[str, Path], Tokenizer]) -> None:
    paths, tokenizer = prepared
    stored = json.loads(paths["prompts"].read_text())
    assert [prompt["question_id"] for prompt in stored["prompts"]] == [1, 2, 3]
    text = tokenizer.decode(stored["prompts"][0]["ids"], skip_special=False)
    assert read_prompts(PROMPTS)[0]["turns"][0] in text


def test_prompt_file_covers_every_category() -> None:
    prompts = read_prompts(PROMPTS)
    assert {prompt["category"] for prompt in prompts} == CATEGORIES
    assert len({prompt["question_id"] for prompt in prompts}) == len(prompts) == 48
    assert all(turn.strip() for prompt in prompts for turn in prompt["turns"])


@pytest.mark.parametrize(("limit", "expected"), [(3, [5, 6, 7]), (9, [5, 6, 7, 2]), (1, [5])])
def test_workers_stop_at_the_limit_or_the_end_token(limit: int, expected: list[int]) -> None:
    job = Job(Path(), [[1]], eos_ids=[2], max_new_tokens=limit, threads=1, batch=1)
    answers = iter([5, 6, 7, 2, 8])
    fed: list[list[int]] = []

    def feed(tokens: list[int]) -> int:
        fed.append(tokens)
        return next(answers)

    assert generate(job, feed, [1, 4]).output_ids == expected
    assert fed == [[1, 4], *([token] for token in expected[:-1])]


def test_rates_are_pooled(prepared: tuple[dict[str, Path], Tokenizer]) -> None:
    def completion(tokens: int, decode_s: float) -> dict[str, Any]:
        return {"output_ids": [7] * tokens, "prefill_s": 0.5, "decode_s": decode_s}

    result = {"version": "x", "wall_s": 20.0, "completions": [completion(11, 1.0), completion(90, 9.0)]}
    summary = summarise(result, prepared[1], batch=1)
    assert summary["tokens_per_s"] == pytest.approx(101 / 20, abs=0.01)
    assert summary["decode_tokens_per_s"] == pytest.approx(99 / 10, abs=0.01)
    side_by_side = summarise(result, prepared[1], batch=2)
    assert side_by_side["tokens_per_s"] == summary["tokens_per_s"]
    assert side_by_side["decode_tokens_per_s"] is None


def test_nonsense_is_told_from_text() -> None:
    assert is_sane("The sky is blue because short waves are scattered more than long ones.")
    for text in ("", "the the the the the the the the", "#$%& !!! ((( @@@ ^^^", "word"):
        assert not is_sane(text)
