"""A mixture of experts from a folder to answers over HTTP: on one rank and on two, with the tokens of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import tiny_models
import torch
import transformers
from artifacts import VOCAB
from commands import flexspec, serving

from flexspec.cli.main import main
from flexspec.compiler.frontends.open_model import open_model
from flexspec.kernels.cpu.build import supported_isas

PROMPT, TOKENS = "hello 12 hello", 40


def write_mixtral(folder: Path) -> transformers.PreTrainedModel:
    """A random Mixtral of five experts with a tokenizer of VOCAB tokens."""
    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=5, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.25)
    model.save_pretrained(folder)
    plain = tiny_models.write_gguf(folder / "tokenizer.gguf", tiny_models.random_weights(VOCAB))
    tokenizer = open_model(plain).tokenizer_json
    assert tokenizer is not None
    (folder / "tokenizer.json").write_bytes(tokenizer)
    return model


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_compile_and_serve(tmp_path: Path, dtype: str) -> None:
    """The SSM is the same mixture: it drafts what is accepted, one row at a time, and the LLM verifies many."""
    model = write_mixtral(tmp_path / "llm")
    stage = {"first_block": 0, "end_block": 2, "ranks": [0, 1]}
    plan = {
        "stages": [stage],
        "ssm_ranks": [[0]],
        "ladder": [[1 << 30, "chain:4/sources=ssm"]],
        "origin": "hand",
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    artifact = tmp_path / "moe.fspec"
    done = flexspec(
        "compile", tmp_path / "llm", "--ssm", tmp_path / "llm", "--plan", tmp_path / "plan.json", "-o", artifact,
        "--dtype", dtype, "--isa", supported_isas()[0],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = {}
    for name, options in {"one": (), "off": ("--draft", "off"), "two": ("--ranks", "2")}.items():
        with serving(artifact, "--threads", "1", *options) as server:
            ask = {"model": "moe", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            body = httpx.post(server.url + "/v1/completions", json=ask, timeout=120.0).json()
            told[name] = body["choices"][0]["text"]
            if name != "off":
                assert body["usage"]["flexspec"]["accepted"] > TOKENS // 2
    assert told["one"] == told["off"]
    if dtype == "f32":
        assert told["two"] == told["one"] == text_of(model, tmp_path / "llm")


def text_of(model: transformers.PreTrainedModel, folder: Path) -> str:
    """What transformers generates, greedily."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None, pad_token_id=0,
            min_new_tokens=TOKENS, max_new_tokens=TOKENS,
        )  # fmt: skip
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False))


def test_inspect_and_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the model is, what each rank would hold, and a plan from its configuration alone."""
    write_mixtral(tmp_path / "llm")
    (tmp_path / "plan.json").write_text(
        json.dumps({"stages": [{"first_block": 0, "end_block": 2, "ranks": [0, 1]}], "ssm_ranks": [],
                    "ladder": [[1 << 30, "off"]], "origin": "hand"})
    )  # fmt: skip
    shown = []
    for arguments in (
        ["inspect", tmp_path / "llm"],
        ["inspect", tmp_path / "llm", "--partition", tmp_path / "plan.json", "--rank", "1"],
        ["plan", tmp_path / "llm" / "config.json", "--machine", "h100x8", "--context", "128", "--prove"],
    ):
        capsys.readouterr()
        assert main([str(word) for word in arguments]) == 0
        shown.append(capsys.readouterr().out)
    assert "5 of ffn_size 48, 2 a token" in shown[0]
    assert "layers.1.mlp.experts.down_proj.weight" in shown[1] and "reduce" in shown[1]
    assert "2.0 of 5 for one row, 5.0 for 16" in shown[2] and "PROOF\n  none of" in shown[2]
