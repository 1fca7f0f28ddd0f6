"""Launch generated kernels: from source (Triton's compiler or interpreter) or from compiled binaries.

Owns the two launchers and nothing of what the kernels mean; a family builds their arguments. ``torch`` and
``triton`` are imported by the launcher that needs them. Binaries go straight to the CUDA driver through ctypes, so
that a machine serves from an artifact without a compiler.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

from flexspec.errors import ArtifactError, EngineError, ToolchainError
from flexspec.kernels.gpu.aot import CompiledKernel, CompiledVariant, triton_version
from flexspec.kernels.gpu.family import Config, Grid, Kernels, Variant, family_of
from flexspec.kernels.gpu.render import import_source, render

_SHARED_BYTES_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_SHARED_LIMIT = 48 * 1024  # above it a kernel has to ask, CUDA C++ Programming Guide, "Shared Memory"


def interpreting() -> bool:
    """Whether Triton runs kernels on the CPU in its interpreter (it decides when it is first imported)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def load_kernels(compiled: CompiledVariant) -> Kernels:
    """Kernels for the GPU that is there: binaries if the CUDA driver loads them, else compiled from their source.

    Raises as BinaryKernels and SourceKernels.
    """
    if compiled.target.backend == "cuda":
        return BinaryKernels(compiled)
    return SourceKernels(compiled.variant, compiled.config, compiled.source)


class SourceKernels:
    """Kernels compiled by Triton at their first launch, or interpreted; ``source`` None renders it here.

    Raises ToolchainError when Triton is not installed.
    """

    def __init__(self, variant: Variant, config: Config, source: str | None = None) -> None:
        triton_version()
        self.variant = variant
        self.config = config
        self._module = import_source(source or render(variant, config))
        self._options = {
            entry.name: {
                "num_warps": config.warps,
                "num_stages": config.stages if entry.stages is None else entry.stages,
                "enable_fp_fusion": True,
            }
            for entry in family_of(variant.family).entries(variant)
        }

    def launch(self, entry: str, grid: Grid, args: Sequence[Any]) -> None:
        getattr(self._module, entry)[grid](*args, **self._options[entry])


class BinaryKernels:
    """Kernels of a compiled variant on the current CUDA device, on torch's current stream.

    Raises ToolchainError without a CUDA driver and ArtifactError when the binary is not for this device.
    """

    def __init__(self, compiled: CompiledVariant) -> None:
        if compiled.target.backend != "cuda":
            raise ToolchainError(
                f"binaries for {compiled.target.name}", "an NVIDIA target", "launch from source on this device"
            )
        self.variant = compiled.variant
        self.config = compiled.config
        driver = load_driver()
        self._driver = driver
        self._context = _primary_context(driver)
        self._functions = {entry: _load_function(driver, kernel) for entry, kernel in compiled.kernels.items()}
        self._kernels = compiled.kernels

    def launch(self, entry: str, grid: Grid, args: Sequence[Any]) -> None:
        import torch

        kernel = self._kernels[entry]
        # Pointers of torch tensors are aligned to 16 bytes, as the binaries assume.
        values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
        params = pack_params(kernel.meta["params"], values)
        threads = kernel.meta["warps"] * kernel.meta["warp_size"]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._driver.cuCtxSetCurrent(self._context)  # the calling thread may never have used CUDA
        code = self._driver.cuLaunchKernel(
            self._functions[entry], *grid, threads, 1, 1, kernel.meta["shared_bytes"], stream, params.pointers, None
        )
        _check(self._driver, code, f"launching {entry} of {self.variant.name}")


class PackedParams:
    """Kernel arguments as the driver takes them: an array of pointers to each argument's storage."""

    def __init__(self, storage: list[Any]) -> None:
        self.storage = storage  # kept alive as long as the pointers
        self.pointers = (ctypes.c_void_p * len(storage))(*(ctypes.addressof(value) for value in storage))


def pack_params(params: Sequence[Sequence[str]], values: Sequence[int | float]) -> PackedParams:
    """Pack ``values`` for the (name, type) list ``params``; Triton adds two scratch pointers, which are null here."""
    assert len(params) == len(values), f"{len(values)} arguments for {len(params)} parameters"
    storage: list[Any] = []
    for (name, kind), value in zip(params, values, strict=True):
        if kind.startswith("*"):
            assert int(value) % 16 == 0, f"{name} is not aligned to 16 bytes"
            storage.append(ctypes.c_void_p(int(value)))
        else:
            storage.append(ctypes.c_int32(int(value)) if kind == "i32" else ctypes.c_float(value))
    storage += [ctypes.c_void_p(0), ctypes.c_void_p(0)]
    return PackedParams(storage)


def load_driver() -> Any:
    """The CUDA driver library. Raises ToolchainError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ToolchainError(f"no CUDA driver ({error})", "libcuda.so.1", "install the NVIDIA driver") from None


def _primary_context(driver: Any) -> ctypes.c_void_p:
    """The context torch uses on its current device, made current for this thread."""
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    context = ctypes.c_void_p()
    code = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device())
    _check(driver, code or driver.cuCtxSetCurrent(context), "taking the CUDA context")
    return context


def _load_function(driver: Any, kernel: CompiledKernel) -> ctypes.c_void_p:
    meta = kernel.meta
    what = f"loading {meta['symbol']} for {meta['target']}"
    if meta["global_scratch_bytes"] or meta["profile_scratch_bytes"]:
        raise ArtifactError(f"{what}: it needs scratch memory", "none", "compile it with an unchanged Triton")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    code = driver.cuModuleLoadData(ctypes.byref(module), kernel.binary)
    code = code or driver.cuModuleGetFunction(ctypes.byref(function), module, meta["symbol"].encode())
    if not code and meta["shared_bytes"] > _STATIC_SHARED_LIMIT:
        code = driver.cuFuncSetAttribute(function, _SHARED_BYTES_ATTRIBUTE, meta["shared_bytes"])
    _check(driver, code, what, loading=True)
    return function


def _check(driver: Any, code: int, what: str, *, loading: bool = False) -> None:
    if code == 0:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    found = f"{what} failed: {(text.value or b'unknown error').decode()} (CUDA error {code})"
    if loading:
        raise ArtifactError(found, "a binary for this device", "compile for this device's target")
    raise EngineError(found, "a launch without error", "restart the engine; report this if it comes back")
