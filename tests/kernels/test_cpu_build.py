"""Building: what the cache key covers, which instruction set is chosen, and errors in the compiler's words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from step_models import on_cpu, tiny_config, tiny_llm

from flexspec.errors import ArtifactError, CompileError, ToolchainError
from flexspec.kernels import cpu_build
from flexspec.kernels.cpu_launch import CpuLibrary

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
