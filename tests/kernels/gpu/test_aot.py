"""Compilation ahead of time, with no GPU: binaries for every target, their resources, the cache and the package."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexspec.errors import ArtifactError, CompileError, ToolchainError
from flexspec.kernels.gpu import aot as triton_aot
from flexspec.kernels.gpu.aot import CompiledKernel, CompiledVariant, Resources, compile_variant, compile_variants
from flexspec.kernels.gpu.attention.variant import AttentionVariant, TileConfig, candidate_configs
from flexspec.kernels.gpu.package import format_rows, package_kernels, read_packaged
from flexspec.kernels.gpu.targets import target_of
from flexspec.types import DType

pytestmark = pytest.mark.slow(reason="Triton compiles in processes of its own")

SMALL = AttentionVariant("incremental", 32, 1, 1, DType.BF16, 16)  # the quickest to compile
TARGETS = ["sm_80", "sm_90", "gfx942"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def compiled(cache: Path) -> tuple[CompiledVariant, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # as in a process that interprets: the worker must not
        return compile_variants([SMALL], TARGETS, cache_dir=cache)


def test_binaries_fit_every_target(compiled: tuple[CompiledVariant, ...]) -> None:
    assert [each.target.name for each in compiled] == TARGETS
    for each in compiled:
        assert each.fits() and each.config == candidate_configs(SMALL, each.target)[0]
        for kernel in each.kernels.values():
            assert kernel.binary.startswith(b"\x7fELF")
            assert 16 <= kernel.resources.registers <= 512
            assert kernel.meta["symbol"] == kernel.meta["entry"]
            assert kernel.meta["global_scratch_bytes"] == kernel.meta["profile_scratch_bytes"] == 0
        assert each.kernels["attend"].resources.shared_bytes > 0
        assert [name for name, _ in each.kernels["attend"].meta["params"]][:3] == ["q", "k_cache", "v_cache"]


def test_second_compilation_reads_the_cache(
    compiled: tuple[CompiledVariant, ...], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_worker(*_: object) -> dict[str, str]:
        raise AssertionError("the worker must not run")

    monkeypatch.setattr(triton_aot, "_run_worker", no_worker)
    assert compile_variants([SMALL], TARGETS, cache_dir=cache) == compiled
    with pytest.raises(AssertionError, match="must not run"):  # another setting of Triton is another key
        monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
        compile_variants([SMALL], TARGETS, cache_dir=cache)


def test_binaries_are_the_same_bytes_from_another_folder(compiled: tuple[CompiledVariant, ...], tmp_path: Path) -> None:
    again = compile_variant(SMALL, "sm_90", cache_dir=tmp_path / "somewhere" / "deeper")
    assert again == compiled[1]


def test_package_holds_all_an_artifact_needs(
    compiled: tuple[CompiledVariant, ...], cache: Path, tmp_path: Path
) -> None:
    rows = package_kernels([SMALL, SMALL], TARGETS, tmp_path, cache_dir=cache)
    assert len(rows) == 2 * len(TARGETS) and all(row["spill_bytes"] == 0 for row in rows)
    table = format_rows(rows).splitlines()
    assert table[0].split()[:3] == ["variant", "target", "kernel"] and len(table) == 1 + len(rows)

    read = lambda path: (tmp_path / path).read_bytes()  # noqa: E731
    for each in compiled:
        assert read_packaged(SMALL, each.target.name, read) == each
    files = sorted(path.name for path in (tmp_path / "kernels" / SMALL.name).iterdir())
    assert files == sorted(
        ["meta.json", "source.k64_w4_s3_two.py"]
        + [f"{target}.{entry}.bin" for target in TARGETS for entry in ("attend", "merge")]
    )
    assert str(tmp_path) not in (tmp_path / "kernels" / SMALL.name / "meta.json").read_text()


def test_package_without_the_target_or_with_a_damaged_file_is_refused(
    compiled: tuple[CompiledVariant, ...], cache: Path
) -> None:
    files: dict[str, bytes] = {}
    package_kernels([SMALL], ["sm_90"], files.__setitem__, cache_dir=cache)
    with pytest.raises(ArtifactError, match="--target sm_80"):
        read_packaged(SMALL, "sm_80", files.__getitem__)
    name = f"kernels/{SMALL.name}/sm_90.attend.bin"
    files[name] = files[name][:-1] + b"?"
    with pytest.raises(ArtifactError, match="sm_90.attend.bin is damaged"):
        read_packaged(SMALL, "sm_90", files.__getitem__)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda facts: facts.pop("config"), "config: missing"),
        (lambda facts: facts["config"].update(block_keys="many"), "config.block_keys: 'many'"),
        (lambda facts: facts["config"].update(blocks=3), "config.blocks: an unknown key"),
        (lambda facts: facts["kernels"]["merge"]["resources"].pop("registers"), "merge.resources.registers: missing"),
        (lambda facts: facts["source"].update(sha256=7), "source.sha256: 7"),
    ],
)
def test_a_package_with_a_malformed_description_is_refused(
    compiled: tuple[CompiledVariant, ...], cache: Path, edit: Callable[[Any], object], words: str
) -> None:
    files: dict[str, bytes] = {}
    package_kernels([SMALL], ["sm_90"], files.__setitem__, cache_dir=cache)
    name = f"kernels/{SMALL.name}/meta.json"
    meta = json.loads(files[name])
    edit(meta["targets"]["sm_90"])
    files[name] = json.dumps(meta).encode()
    with pytest.raises(ArtifactError, match=rf"meta\.json: targets\.sm_90\..*{words}"):
        read_packaged(SMALL, "sm_90", files.__getitem__)
    files[name] = b"{"
    with pytest.raises(ArtifactError, match=r"meta\.json is not JSON"):
        read_packaged(SMALL, "sm_90", files.__getitem__)


def _fake(job: triton_aot._CompileJob, spill: int, shared: int) -> CompiledVariant:
    attend = CompiledKernel(b"", {"entry": "attend"}, Resources(255, spill, shared))
    merge = CompiledKernel(b"", {"entry": "merge"}, Resources(32, 0, 0))
    return CompiledVariant(job.variant, job.config, job.target, "0", job.source, {"attend": attend, "merge": merge})


def test_first_configuration_inside_the_budget_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = target_of("sm_90").shared_limit_bytes
    outcome = {0: (16, 1), 1: (0, limit + 1), 2: (0, limit)}  # spills; too much shared memory; just fits
    variant = AttentionVariant("tree_verify", 128, 4, 1, DType.BF16, 64)
    configs = candidate_configs(variant, target_of("sm_90"))
    monkeypatch.setattr(
        triton_aot, "_compile_all",
        lambda jobs, *_: [_fake(job, *outcome[configs.index(job.config)]) for job in jobs],
    )  # fmt: skip
    assert compile_variants([variant], ["sm_90"], cache_dir=tmp_path)[0].config == configs[2]


def test_nothing_inside_the_budget_is_an_error_with_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        triton_aot, "_compile_all",
        lambda jobs, *_: ["OutOfResources" if job.config.warps == 4 else _fake(job, 8, 70_000) for job in jobs],
    )  # fmt: skip
    with pytest.raises(CompileError) as caught:
        compile_variants([SMALL], ["gfx942"], cache_dir=tmp_path)
    for config in candidate_configs(SMALL, target_of("gfx942")):
        assert config.name in caught.value.found
    assert "OutOfResources" in caught.value.found and "8 bytes spilled" in caught.value.found


def test_compiler_error_and_compiler_crash_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TileConfig(64, 3, 2)  # Triton wants a power of two of warps
    with pytest.raises(CompileError, match="k64_w3_s2_two: .*num_warps"):
        compile_variant(SMALL, "sm_90", config=config, cache_dir=tmp_path)
    monkeypatch.setattr(triton_aot, "_WORKER", ["-c", "import os, sys; sys.stderr.write('LLVM ERROR'); os._exit(139)"])
    with pytest.raises(CompileError, match="ended, exit code 139: LLVM ERROR"):
        compile_variant(SMALL, "sm_90", config=replace(config, warps=2), cache_dir=tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".work")]


def test_missing_triton_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> str:
        raise triton_aot.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(triton_aot.importlib.metadata, "version", missing)
    with pytest.raises(ToolchainError, match="pip install triton"):
        compile_variant(SMALL, "sm_90", cache_dir=tmp_path)


def test_meta_is_plain_json(compiled: tuple[CompiledVariant, ...]) -> None:
    for each in compiled:
        assert json.loads(json.dumps(each.kernels["attend"].meta)) == each.kernels["attend"].meta
