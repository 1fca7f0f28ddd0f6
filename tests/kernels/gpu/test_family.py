"""Kernel families: found by presence, asked for by the records of operators, unknown names refused."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import flexspec.kernels.gpu.families as package
from flexspec.builder import GraphBuilder
from flexspec.compiler.passes.pipeline import LLM_PASSES, run_passes
from flexspec.errors import CompileError
from flexspec.graph import Graph
from flexspec.kernels.gpu import family as registry
from flexspec.kernels.gpu.family import KernelFamily, families, family_of, kernel_variants
from flexspec.kernels.gpu.render import render
from flexspec.kernels.gpu.targets import TARGETS
from flexspec.models.config import ModelConfig
from flexspec.models.llama import build_llama
from flexspec.ops import record
from flexspec.types import DType

CONFIG = ModelConfig("llama", 64, 64, 2, 4, 2, 16, 96, 1e-5, 128)

TOY = """
from dataclasses import replace
from flexspec.kernels.gpu.families.rowwise import FAMILY as ROWWISE
FAMILY = replace(ROWWISE, name="toy")
"""


def small_graph(dtype: DType = DType.BF16) -> Graph:
    b = GraphBuilder("small", dtype)
    x = b.input("x", ("T", 8))
    (y,) = b.call("add", (x, x), {}, names=("y",))
    return b.finish(y)


def test_families_of_the_project() -> None:
    assert set(families()) >= {"rowwise", "tree_attention"}


def test_a_file_in_the_folder_is_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "_FAMILIES", {})
    monkeypatch.setitem(sys.modules, "flexspec.kernels.gpu.families.toy", None)  # so that the teardown forgets it
    del sys.modules["flexspec.kernels.gpu.families.toy"]
    added = replace(record.record_of("add"), kernel=record.KernelKey("rowwise", "toy", "x0 + x1"))
    monkeypatch.setitem(record._RECORDS, "add", added)
    assert family_of("toy").template == "rowwise.py.j2"
    assert [variant.name for variant in kernel_variants(small_graph(), 1).values()] == ["rowwise_add_3c485f03_bf16"]


def test_every_record_names_a_known_family() -> None:
    named = {name: each.kernel.triton for name, each in record.all_records().items()}
    known = {record.REFERENCE, record.EXCHANGE, *families()}
    assert {name: key for name, key in named.items() if key not in known} == {}
    assert {name for name, key in named.items() if key == record.EXCHANGE} == {
        name for name, each in record.all_records().items() if each.exchange
    }


def test_an_unknown_family_is_refused_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(record.record_of("add"), kernel=record.KernelKey("rowwise", "row_wise", "x0 + x1"))
    monkeypatch.setitem(record._RECORDS, "add", wrong)
    with pytest.raises(CompileError, match="kernel family 'row_wise'.*one of rowwise"):
        kernel_variants(small_graph(), 64)


def test_nodes_of_a_model_name_their_variants() -> None:
    canonical = build_llama(CONFIG, DType.BF16)
    names = [variant.name for variant in kernel_variants(canonical, 64).values()]
    layer = ["tree_verify_d16_g2_w1_p32_r64_bf16", "rowwise_add", "rowwise_swiglu", "rowwise_add"]
    assert [name if name.startswith("tree") else "_".join(name.split("_")[:2]) for name in names] == 2 * layer
    lowered = kernel_variants(run_passes(canonical, LLM_PASSES), 64)
    assert {variant.family for variant in lowered.values()} == {"tree_attention"}, "all others are fused"


@pytest.mark.parametrize("name", ["rowwise", "tree_attention"])
def test_a_family_keeps_the_promises_of_its_record(name: str) -> None:
    """Names are unique, configurations survive JSON, and the source has the entries."""
    family: KernelFamily = family_of(name)  # type: ignore[type-arg]
    variants = list(dict.fromkeys(case.variant() for case in family.cases(False)))
    assert len({variant.name for variant in variants}) == len(variants) > 1
    for variant in variants:
        configs = family.configs(variant, TARGETS["sm_90"])
        assert len({config.name for config in configs}) == len(configs) > 0
        assert all(family.config_type(**asdict(config)) == config for config in configs)
        source = render(variant, configs[0])
        for entry in family.entries(variant):
            assert f"\ndef {entry.name}(" in source
    labels = [case.label for case in family.cases(False)]
    assert len(set(labels)) == len(labels)
    interpreted = [case.label for case in family.cases(True)]
    assert interpreted and set(interpreted) < set(labels)
