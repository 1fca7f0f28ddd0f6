"""The whole command on a tiny random model: same bytes after a kill, a folder that loads, and the settings in it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from flexspec.cli.main import main
from flexspec.compiler.artifact.ngram_table import load_table
from flexspec.compiler.frontends.open_model import LoadedModel, open_model
from flexspec.errors import TuneError
from flexspec.models.fused_state import build_fused_state
from flexspec.models.registry import build_model
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.runtime.tune import export as export_module
from flexspec.runtime.tune import run as run_module
from flexspec.runtime.tune.config import GenerateConfig, TrainConfig, TuneConfig
from flexspec.runtime.tune.llm import open_executor
from flexspec.runtime.tune.run import tune
from flexspec.types import DType, Role

pytestmark = pytest.mark.slow(reason="trains with torch")

CONFIG = TuneConfig(
    generate=GenerateConfig(shards=3, shard_size=8, batch=8, max_invented_tokens=6, max_passage_tokens=8,
                            max_prompt_tokens=200, max_answer_tokens=8),
    train=TrainConfig(epochs=2, batch_tokens=400, frequent=32, sampled=16, checkpoint_steps=3),
    tap_layers=(1,), reduced_vocab_size=64, held_out_every=4, ngram_bytes=20_000,
)  # fmt: skip


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama folder with a byte-level tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("llm") / "tiny"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<start>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<start>{{ m.role }} {{ m.content }}<end>{% endfor %}<start>assistant "
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<end>"}))
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-5, "vocab_size": 260,
        "max_position_embeddings": 512, "tie_word_embeddings": True, "bos_token_id": 256, "eos_token_id": 257,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    plain = {"embed_tokens.weight": (260, 16), "norm.weight": (16,)}
    for i in range(2):
        layer = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16),
                 "self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16),
                 "mlp.down_proj": (16, 24), "input_layernorm": (16,), "post_attention_layernorm": (16,)}  # fmt: skip
        plain |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    save_file(
        {f"model.{n}": rng.standard_normal(s).astype(np.float32) for n, s in plain.items()},
        folder / "model.safetensors",
    )
    return folder


def _open_llm(model: LoadedModel, config: TuneConfig) -> ReferenceExecutor:
    graph = build_model(model.config, DType.F32, taps=config.tap_layers)
    weights = {value.name: model.weights.get(value.name) for value in graph.inputs_of(Role.WEIGHT)}
    return ReferenceExecutor(graph, weights, 80, 128)


def _tune(llm: Path, out: Path, work: Path, config: TuneConfig = CONFIG, stop_at: tuple[str, int] = ("", 0)) -> None:

    def progress(phase: str, done: int, total: int) -> None:
        if (phase, done) == stop_at:
            raise KeyboardInterrupt

    tune(llm, out, work, config, progress, lambda line: None, "flexspec tune tiny", _open_llm)


@pytest.fixture(scope="module")
def made(llm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ssm")
    _tune(llm, folder / "out", folder / "work")
    return folder / "out"


def test_a_killed_run_ends_with_the_same_bytes(llm: Path, made: Path, tmp_path: Path) -> None:
    for stop_at in (("inventing and answering", 19), ("training", 4)):
        with pytest.raises(KeyboardInterrupt):
            _tune(llm, tmp_path / "out", tmp_path / "work", stop_at=stop_at)
    assert list((tmp_path / "work").glob("train-*")) and not (tmp_path / "out").exists()
    _tune(llm, tmp_path / "out", tmp_path / "work", replace(CONFIG, generate=replace(CONFIG.generate, batch=3)))
    names = sorted(path.name for path in made.iterdir())
    assert names == ["README.md", "config.json", "model.safetensors", "ngram.safetensors", "tune.json"]
    for name in names:
        if name != "tune.json":  # it records the batch size
            assert (tmp_path / "out" / name).read_bytes() == (made / name).read_bytes()


def test_the_folder_loads_as_an_ssm(llm: Path, made: Path) -> None:
    ssm, source = open_model(made), open_model(llm)
    assert ssm.config.family == "fused_state" and ssm.fused is not None and ssm.fused.tap_layers == (1,)
    keep = ssm.fused.keep_ids
    assert keep is not None
    assert len(keep) == ssm.fused.reduced_vocab_size == 64 and len(set(keep.tolist())) == 64
    graph = build_fused_state(ssm.config, DType.BF16, reduced_vocab_size=64)
    needed = {v.name: v.type.dims for v in graph.inputs_of(Role.WEIGHT)}
    shared = {"embed_tokens.weight", "lm_head.weight"}
    have = {name: ssm.weights.shape(name) for name in ssm.weights.names()}
    fuse = {"fuse.norms.0.weight": (16,), "fuse.taps.0.weight": (16, 16), "fuse.taps.1.weight": (16, 16)}
    assert have == {name: dims for name, dims in needed.items() if name not in shared} | fuse
    embedding = source.weights.get("embed_tokens.weight")
    weights = {name: ssm.weights.get(name) for name in have if not name.startswith("fuse.")}
    executor = ReferenceExecutor(
        graph, weights | {"embed_tokens.weight": embedding, "lm_head.weight": embedding[keep]}, 4, 8
    )
    assert executor.vocab_size == 64
    assert load_table(made / "ngram.safetensors")


def test_a_mixture_of_experts_can_be_tuned_too(llm: Path, tmp_path: Path) -> None:
    """Its program has taps as any other family's, and the SSM gets one MLP in place of the experts."""
    folder = shutil.copytree(llm, tmp_path / "mixture")
    changes = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps(json.loads((llm / "config.json").read_text()) | changes))
    weights = load_file(llm / "model.safetensors")
    for i in range(2):
        experts = f"model.layers.{i}.block_sparse_moe"
        for ours, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            matrix = weights.pop(f"model.layers.{i}.mlp.{ours}_proj.weight")
            weights |= {f"{experts}.experts.{x}.{theirs}.weight": matrix * (x + 1) for x in range(3)}
        weights[f"{experts}.gate.weight"] = np.eye(3, 16, dtype=np.float32)
    save_file(weights, folder / "model.safetensors")
    _tune(folder, tmp_path / "out", tmp_path / "work")
    ssm = open_model(tmp_path / "out")
    assert (ssm.config.family, ssm.config.experts) == ("fused_state", 0)
    assert ssm.weights.shape("layers.0.mlp.gate_proj.weight") == (24, 16)
    executor = open_executor(open_model(folder), (1,), pages=2, max_rows=8, threads=1)
    assert executor.facts.feature_columns == 2 * 16
    executor.close()


def test_card_and_settings_tell_how_it_was_made(llm: Path, made: Path) -> None:
    record = json.loads((made / "tune.json").read_text())
    assert record["llm"]["source_hash"] == open_model(llm).source_hash
    assert record["settings"]["train"]["epochs"] == 2 and record["result"]["conversations"] <= 24
    card = (made / "README.md").read_text()
    rate = record["result"]["greedy"]["hits"][0][0]
    assert f"| 1 | {rate:.3f} |" in card and "`flexspec tune tiny`" in card and "apache-2.0" in card


def test_a_folder_too_big_is_refused(llm: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "MAX_BYTES", 5000)
    with pytest.raises(TuneError, match="at most 5000"):
        _tune(llm, tmp_path / "out", made.parent / "work")
    assert not (tmp_path / "out").exists()


def test_the_command_line(
    llm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = {}

    def fake(model, out, work, config, progress, log, command):  # type: ignore[no-untyped-def]
        seen.update(model=model, config=config, command=command, work=work)
        raise TuneError("nothing", "something", "try")

    monkeypatch.setattr(run_module, "tune", fake)
    words = [
        "tune",
        str(llm),
        "-o",
        str(tmp_path / "ssm" / "x"),
        "--shards",
        "3",
        "--tap-layers",
        "1",
        "--epochs",
        "0.5",
    ]
    assert main([*words, "--work", str(tmp_path)]) == 2
    assert seen["command"] == "flexspec tune tiny -o ssm/x --shards 3 --epochs 0.5 --tap-layers 1"
    assert seen["config"].generate.shards == 3 and seen["config"].tap_layers == (1,) and seen["work"] == tmp_path
    assert main([*words[:-1], "0"]) == 2
    assert "--epochs 0.0; expected at least 0.01" in capsys.readouterr().err
