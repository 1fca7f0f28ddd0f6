"""A model family is one file: dropped in, its folders compile and are served, whole or cut over ranks.

The one here has what no other has: learned positions, a table in place of rotations.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from artifacts import VOCAB
from step_models import chain_rows, on_cpu, random_tree, random_weights, tiny_config, tree_rows

import flexspec.models
from flexspec import LLM, SamplingParams
from flexspec.compiler.artifact.plan import Stage
from flexspec.compiler.frontends.open_model import open_model
from flexspec.compiler.partition.cut_ranks import partition
from flexspec.errors import CapacityError, ModelConfigError
from flexspec.graph import Graph
from flexspec.kernels.cpu.build import supported_isas
from flexspec.kernels.package.compile_model import compile_model
from flexspec.kernels.package.options import CompileOptions
from flexspec.models import registry
from flexspec.models.registry import build_model, families
from flexspec.runtime.executors.pages import pack_rows
from flexspec.runtime.executors.step import Executor
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.runtime.reference.ranks import ReferenceRanks
from flexspec.types import DType

POSITIONS = 64  # rows of the family's table, fewer than its config.json promises
FAMILY = '''
"""A Llama with a table of positions."""

from flexspec.models.config import Checkpoint
from flexspec.models.llama import build_decoder, embed_tokens, swiglu_mlp
from flexspec.models.registry import register_family


def build_learned(config, dtype, *, taps=(), name="llm"):
    return build_decoder(
        config, dtype, lambda layer: swiglu_mlp, embed=_embed, rotary=False, taps=taps, name=name
    )


def _embed(b, step, config, name):
    table = b.weight("embed_positions.weight", (64, config.hidden_size))
    return b.add(embed_tokens(b, step, config, ""), b.embedding(step.positions_T, table), name=name)


register_family(
    "learned",
    build_learned,
    {"LearnedForCausalLM": Checkpoint(positions=64, stored_names=(("wpe.weight", "embed_positions.weight"),))},
)
'''


@pytest.fixture
def learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The family in a file of its own, gone afterwards."""
    (tmp_path / "learned.py").write_text(FAMILY)
    monkeypatch.setattr(registry, "_FAMILIES", dict(families()))
    monkeypatch.setattr(registry, "_ARCHITECTURES", dict(registry.architectures()))
    monkeypatch.setattr(flexspec.models, "__path__", [*flexspec.models.__path__, str(tmp_path)])
    yield
    sys.modules.pop("flexspec.models.learned", None)


def write_folder(folder: Path) -> Path:
    """A Hugging Face folder of the family, with a tokenizer."""
    weights = tiny_models.random_weights(VOCAB)
    table_PE = np.random.default_rng(5).standard_normal((POSITIONS, tiny_models.HIDDEN)).astype(np.float32)
    settings = {"architectures": ["LearnedForCausalLM"], "max_position_embeddings": 4 * POSITIONS, "rope_theta": None}
    tiny_models.write_huggingface(folder, {**weights, "wpe.weight": table_PE}, **settings)
    tokenizer = open_model(tiny_models.write_gguf(folder / "llama.gguf", weights)).tokenizer_json
    assert tokenizer is not None
    (folder / "tokenizer.json").write_bytes(tokenizer)
    return folder


def graph_of(*, taps: tuple[int, ...] = ()) -> Graph:
    return build_model(tiny_config(family="learned"), DType.F32, taps=taps)


def steps(executor: Executor, vocab: int) -> list[np.ndarray]:
    """Logits and features of a prefill and of a tree behind it."""
    rng = np.random.default_rng(0)
    groups = [
        chain_rows(rng.integers(0, vocab, 20).tolist(), 0, [3, 1]),
        tree_rows(random_tree(rng, 9, vocab), 20, [3, 1]),
    ]
    results = [executor.step(pack_rows([group]), want_logits=True) for group in groups]
    found = [array for result in results for array in (result.logits_LV, result.features_TE)]
    return [array.copy() for array in found if array is not None]


@pytest.mark.usefixtures("learned")
def test_its_program_and_its_ranks_compute_what_the_graph_says() -> None:
    graph = graph_of(taps=(0, 1))
    weights = random_weights(graph)
    wanted = steps(ReferenceExecutor(graph, weights, 16, 96), 203)
    ranks = partition(graph, [Stage(0, 1, (0, 1)), Stage(1, 2, (2,))])
    for executor in (on_cpu(graph, weights), ReferenceRanks(ranks, weights.__getitem__, 16, 96)):
        found = steps(executor, 203)
        assert len(found) == len(wanted) == 4
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("learned")
def test_heads_that_are_not_rotated_may_have_an_odd_dim() -> None:
    config = tiny_config(family="learned", head_dim=9)
    graph = build_model(config, DType.F32)
    weights = random_weights(graph)
    wanted, found = (
        steps(executor, 203) for executor in (ReferenceExecutor(graph, weights, 16, 96), on_cpu(graph, weights))
    )
    for a, b in zip(wanted, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
    with pytest.raises(ModelConfigError, match=r"head dim 9; expected an even head dim \(rotary pairs\)"):
        build_model(replace(config, family="llama"), DType.F32)


@pytest.mark.usefixtures("learned")
def test_its_positions_count() -> None:
    graph = graph_of()
    weights = random_weights(graph)
    moved = {**weights, "embed_positions.weight": np.roll(weights["embed_positions.weight"], 1, 0)}
    first, second = (steps(ReferenceExecutor(graph, each, 16, 96), 203) for each in (weights, moved))
    assert np.abs(first[0] - second[0]).max() > 0.1


@pytest.mark.usefixtures("learned")
def test_a_folder_is_compiled_and_served(tmp_path: Path) -> None:
    """Up to the table's last position, with speculation as without; no prompt goes beyond."""
    options = CompileOptions(DType.F32, isas=supported_isas()[:1])
    artifact, _ = compile_model(write_folder(tmp_path / "llm"), [], tmp_path / "x.fspec", options, argv=["flexspec"])
    answers = []
    for draft in ("off", "budget:16/sources=suffix"):
        with LLM(artifact, draft=draft, threads=1, kv_tokens=1024, measure=False) as llm:
            done = llm.generate("hello 12 hello 12", SamplingParams(max_tokens=200, ignore_eos=True))[0]
            answers.append(list(done.token_ids))
            assert (done.stats.drafted > 0) == (draft != "off")
            with pytest.raises(CapacityError, match=f"expected fewer than {POSITIONS}"):
                llm.generate("hello 12 " * POSITIONS)
    assert answers[0] == answers[1] and len(answers[0]) > POSITIONS // 2
