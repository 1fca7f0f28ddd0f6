"""Launching compiled kernels through the CUDA driver, with the driver replaced: argument packing and errors."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from flexspec.errors import ArtifactError, EngineError, ToolchainError
from flexspec.kernels.gpu import launch as triton_launch
from flexspec.kernels.gpu.aot import CompiledKernel, CompiledVariant, Resources
from flexspec.kernels.gpu.attention.variant import ENTRIES, AttentionVariant, TileConfig
from flexspec.kernels.gpu.family import Entry
from flexspec.kernels.gpu.launch import BinaryKernels, load_driver, pack_params
from flexspec.kernels.gpu.targets import target_of
from flexspec.types import DType

VARIANT = AttentionVariant("tree_verify", 64, 1, 1, DType.BF16, 16)


def _compiled(target: str = "sm_90", shared_bytes: int = 60_000, scratch_bytes: int = 0) -> CompiledVariant:
    def kernel(entry: Entry) -> CompiledKernel:
        meta = {
            "symbol": entry.name, "entry": entry.name, "target": target, "warps": 4, "warp_size": 32,
            "shared_bytes": shared_bytes,
            "global_scratch_bytes": scratch_bytes, "profile_scratch_bytes": 0,
            "params": entry.signature(DType.BF16),
        }  # fmt: skip
        return CompiledKernel(b"cubin", meta, Resources(100, 0, shared_bytes))

    kernels = {entry.name: kernel(entry) for entry in ENTRIES}
    return CompiledVariant(VARIANT, TileConfig(64, 4, 3), target_of(target), "0", "", kernels)


class FakeDriver:
    """Answers every call with ``codes[name]`` or success, and keeps the calls."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append((name, args))
            return self.codes.get(name, 0)

        return call


class FakeStream:
    cuda_stream = 77


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    import torch

    fake = FakeDriver()
    monkeypatch.setattr(triton_launch, "load_driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    return fake


def _read(params: triton_launch.PackedParams, index: int, kind: Any) -> Any:
    return kind.from_address(params.pointers[index]).value


def test_arguments_are_packed_by_the_type_of_the_binary() -> None:
    kinds = [["q", "*bf16"], ["scale", "fp32"], ["splits", "i32"]]
    params = pack_params(kinds, [0x7F0012345670, 0.1, -3])
    assert _read(params, 0, ctypes.c_uint64) == 0x7F0012345670
    assert _read(params, 1, ctypes.c_float) == pytest.approx(0.1, rel=1e-7)
    assert _read(params, 2, ctypes.c_int32) == -3
    assert len(params.pointers) == 5  # and Triton's two scratch pointers
    assert [_read(params, i, ctypes.c_uint64) for i in (3, 4)] == [0, 0]
    with pytest.raises(AssertionError, match="q is not aligned"):
        pack_params(kinds, [0x7F0012345671, 0.1, -3])
    with pytest.raises(AssertionError, match="2 arguments for 3"):
        pack_params(kinds, [0, 0.1])


def test_launch_passes_grid_block_shared_memory_and_stream(driver: FakeDriver) -> None:
    import torch

    kernels = BinaryKernels(_compiled())
    assert [args[2] for name, args in driver.calls if name == "cuFuncSetAttribute"] == [60_000, 60_000]
    partial, lse, out = torch.zeros(64), torch.zeros(8), torch.zeros(64)
    kernels.launch("merge", (2, 1, 1), (partial, lse, out, 8, 1))
    name, args = driver.calls[-1]
    assert name == "cuLaunchKernel" and args[1:8] == (2, 1, 1, 128, 1, 1, 60_000)
    assert args[8].value == 77
    assert ctypes.c_uint64.from_address(args[9][2]).value == out.data_ptr()
    assert ctypes.c_int32.from_address(args[9][3]).value == 8
    assert driver.calls[-2][0] == "cuCtxSetCurrent"


def test_small_shared_memory_needs_no_attribute(driver: FakeDriver) -> None:
    BinaryKernels(_compiled(shared_bytes=48 * 1024))
    assert "cuFuncSetAttribute" not in [name for name, _ in driver.calls]


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_binary_that_does_not_load_is_an_artifact_error(driver: FakeDriver, call: str) -> None:
    driver.codes[call] = 209
    with pytest.raises(ArtifactError, match=r"loading attend for sm_90 failed: .*CUDA error 209"):
        BinaryKernels(_compiled())


def test_launch_that_fails_is_an_engine_error(driver: FakeDriver) -> None:
    kernels = BinaryKernels(_compiled())
    driver.codes["cuLaunchKernel"] = 1
    with pytest.raises(EngineError, match="launching merge of tree_verify_d64"):
        kernels.launch("merge", (1, 1, 1), (0, 0, 0, 8, 1))


def test_binary_that_wants_scratch_memory_or_another_vendor_is_refused(driver: FakeDriver) -> None:
    with pytest.raises(ArtifactError, match="scratch memory"):
        BinaryKernels(_compiled(scratch_bytes=128))
    with pytest.raises(ToolchainError, match="gfx942"):
        BinaryKernels(_compiled(target="gfx942"))


def test_missing_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(ToolchainError, match="no CUDA driver"):
        load_driver()
