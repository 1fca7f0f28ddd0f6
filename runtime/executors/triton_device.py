"""Where Triton's kernels run: on a GPU, or in Triton's interpreter on the CPU. All that differs between the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexspec.errors import ToolchainError
from flexspec.graph import Graph
from flexspec.kernels.gpu.aot import CompiledVariant, compile_variant
from flexspec.kernels.gpu.family import Config, Kernels, Variant, family_of
from flexspec.kernels.gpu.launch import SourceKernels, interpreting, load_kernels
from flexspec.kernels.gpu.targets import TARGETS
from flexspec.types import DType


@dataclass(frozen=True, slots=True)
class TritonDevice:
    """One of the two."""

    torch_name: str  # of the device that holds the tensors
    check: Callable[[Graph], None]  # raises ToolchainError if the graph's kernels cannot run there
    kernels: Callable[[Variant, CompiledVariant | None], Kernels]  # loaded; what was not compiled ahead is compiled


def gpu_architecture() -> str:
    """The GPU's architecture as ``--target`` names it: sm_90, gfx942, ... Raises ToolchainError without a GPU."""
    if not torch.cuda.is_available():
        raise ToolchainError("no CUDA device", "one that torch can use", "run it with --device cpu")
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(torch.device("cuda")).gcnArchName.split(":")[0])
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def _check_gpu(graph: Graph) -> None:
    del graph
    gpu_architecture()


def _gpu_kernels(variant: Variant, compiled: CompiledVariant | None) -> Kernels:
    if compiled is not None:
        return load_kernels(compiled)
    name = gpu_architecture()  # take the configuration that the budget check of its target takes
    return SourceKernels(variant, compile_variant(variant, name).config if name in TARGETS else _plain(variant))


def _check_interpreter(graph: Graph) -> None:
    if not interpreting():
        raise ToolchainError(
            "Triton kernels on the CPU", "TRITON_INTERPRET=1 in the environment",
            "set it before Python starts, or use the CPU backend",
        )  # fmt: skip
    if any(value.type.dtype is DType.BF16 for value in graph.inputs):
        raise ToolchainError(
            "a bf16 model in Triton's interpreter", "f32 or f16 (the interpreter computes bf16 products wrongly)",
            "build the graph in f32 (flexspec compile --dtype f32)",
        )  # fmt: skip


def _interpreted_kernels(variant: Variant, compiled: CompiledVariant | None) -> Kernels:
    if compiled is None:
        return SourceKernels(variant, _plain(variant))
    return SourceKernels(variant, compiled.config, compiled.source)


def _plain(variant: Variant) -> Config:
    config: Config = family_of(variant.family).plain_config
    return config


GPU = TritonDevice("cuda", _check_gpu, _gpu_kernels)
INTERPRETER = TritonDevice("cpu", _check_interpreter, _interpreted_kernels)
