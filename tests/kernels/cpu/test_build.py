"""Building: what the cache key covers, which instruction set is chosen, and errors in the compiler's words."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from step_models import on_cpu, tiny_config, tiny_llm

from flexspec.errors import ArtifactError, CompileError, ToolchainError
from flexspec.host.exits import describe_exit
from flexspec.kernels.cpu import build as cpu_build
from flexspec.kernels.cpu.launch import CpuLibrary
from flexspec.kernels.cpu.render import render
from flexspec.models.registry import build_model
from flexspec.ops import record
from flexspec.ops.record import KernelKey, record_of
from flexspec.types import DType

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEXSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cpu"


def test_key_covers_all_that_bytes_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = cpu_build.find_compiler()
    keys = [
        cpu_build.build_key(SOURCE, "generic", compiler),
        cpu_build.build_key(SOURCE + " ", "generic", compiler),
        cpu_build.build_key(SOURCE, "avx2", compiler),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(cpu_build, "_COMMON", (*cpu_build._COMMON, "-g"))
        keys.append(cpu_build.build_key(SOURCE, "generic", compiler))
    with monkeypatch.context() as patch:
        headers = {**cpu_build.header_files(), "kv.h": b"// other"}
        patch.setattr(cpu_build, "header_files", lambda: headers)
        keys.append(cpu_build.build_key(SOURCE, "generic", compiler))
    assert len(set(keys)) == len(keys)
    assert cpu_build.build_key(SOURCE, "generic", compiler) == keys[0]


def test_a_build_is_kept_and_is_the_same_anywhere(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cpu_build.build_path(SOURCE, "generic")
    data, stamp = first.read_bytes(), first.stat().st_mtime_ns
    assert first.parent == cache and [path.name for path in cache.iterdir()] == [first.name]
    assert cpu_build.build_path(SOURCE, "generic").stat().st_mtime_ns == stamp
    monkeypatch.setenv("FLEXSPEC_CACHE", str(tmp_path / "elsewhere"))
    assert cpu_build.build_path(SOURCE, "generic").read_bytes() == data


def test_errors_are_in_the_compilers_words(cache: Path) -> None:
    with pytest.raises(CompileError, match="(?s)failed for generic.*nonsense") as caught:
        cpu_build.build_path("int nonsense = ;\n", "generic")
    assert caught.value.code == "FS301" and not cache.exists()


def fake_compiler(path: Path, body: str) -> str:
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo fake 1 && exit\n{body}\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "found", "fix"),
    [
        ("kill -KILL $$", "was killed by SIGKILL, building for avx2", "memory"),
        ("kill -SEGV $$", "was killed by SIGSEGV, building for avx2", "another compiler"),
        (
            "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
            "was stopped: g++: fatal error: Killed signal terminated program cc1plus",
            "memory",
        ),
        ("exit 3", "with exit code 3:\n(it gave no message)", "compiler version"),
    ],
)
def test_a_compiler_that_is_killed_is_told_from_one_that_complains(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, found: str, fix: str
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path / "cxx", body))
    with pytest.raises(CompileError) as caught:
        cpu_build.build_path(SOURCE, "avx2")
    assert found in caught.value.found and fix in caught.value.fix and not cache.exists()


def test_exits_are_named() -> None:
    assert [describe_exit(code) for code in (0, 3, -9, -200)] == [
        "exit code 0", "exit code 3", "killed by SIGKILL", "killed by signal 200",
    ]  # fmt: skip


def test_an_operator_whose_expression_is_wrong_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(layers=1)
    broken = replace(record_of("add"), kernel=KernelKey("rowwise", expr="x0 + fs_cosh(x1)"))
    graph = build_model(config, DType.F32)  # unfused: the residual connections are row-wise adds
    monkeypatch.setitem(record._RECORDS, "add", broken)
    with pytest.raises(CompileError, match="(?s)expr of operator add does not compile.*fs_cosh"):
        cpu_build.build_path(render(graph).source, "generic")


def test_no_compiler_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolchainError, match=r"g\+\+ or clang\+\+"):
        cpu_build.build_path(SOURCE, "generic")


def test_instruction_set_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEXSPEC_CPU_ISA", raising=False)
    here = cpu_build.supported_isas()
    assert here[-1] == "generic"
    monkeypatch.setenv("FLEXSPEC_CPU_ISA", "generic")
    assert cpu_build.supported_isas() == ("generic",)
    monkeypatch.setenv("FLEXSPEC_CPU_ISA", "sse9")
    with pytest.raises(CompileError, match="FLEXSPEC_CPU_ISA=sse9"):
        cpu_build.supported_isas()


@pytest.mark.slow(reason="builds programs")
def test_library_takes_only_its_own_weights(cache: Path) -> None:
    executor = on_cpu(*tiny_llm(tiny_config(layers=1)), pages=4)
    library, weights = Path(executor._library._lib._name), executor._library._weights
    sizes = {"threads": 1, "max_rows": 8, "pages": 1, "max_positions": 8}
    for wrong in (weights[:-1], weights[::-1], [weights[0][:-1], *weights[1:]], [weights[0].T, *weights[1:]]):
        with pytest.raises(ArtifactError):
            CpuLibrary(library, wrong, **sizes)
    foreign = cpu_build.build_path(SOURCE, "generic")
    with pytest.raises(ArtifactError, match="not a program of this version"):
        CpuLibrary(foreign, [], **sizes)
    executor.close()
    executor.close()
