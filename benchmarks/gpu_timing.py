"""Timings of tree attention on a GPU, with torch's SDPA and the bandwidth of a copy; part of gpu_check.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from flexspec.kernels.gpu.attention.check import AttentionCase
    from flexspec.kernels.gpu.family import Kernels, Variant

SHAPES = {"Llama 2 7B": (32, 32, 128), "Llama 3 8B": (32, 8, 128)}  # query heads, kv heads, head dim
BATCHES, CONTEXTS, TREES = (1, 8), (512, 4096), (1, 16, 64)
CACHE_BYTES = 256 << 20  # K/V that one replay reads at least: several times any L2 cache so far
REPLAYS = 20


@dataclass(frozen=True, slots=True)
class Timing:
    """One attention layer."""

    shape: str
    batch: int
    context: int
    tree: int
    kernel_us: float
    bytes_per_s: float
    share: float  # of the measured copy bandwidth
    sdpa_us: float  # of torch's SDPA with a mask


def gpu_target() -> str | None:
    """The ahead-of-time target of this machine's GPU, if it is a known one."""
    import torch

    from flexspec.kernels.gpu.targets import TARGETS

    name = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return name if name in TARGETS else None


def kernels_for(variant: Variant, device: str, *, from_source: bool) -> dict[str, Kernels]:
    """The launchers of a variant here: a binary compiled ahead of time, and on request Triton's own launch."""
    from flexspec.kernels.gpu.aot import compile_variant
    from flexspec.kernels.gpu.family import family_of
    from flexspec.kernels.gpu.launch import BinaryKernels, SourceKernels

    target = gpu_target() if device == "cuda" else None
    if target is None:
        plain = family_of(variant.family).plain_config
        return {"interpreter" if device == "cpu" else "source": SourceKernels(variant, plain)}
    compiled = compile_variant(variant, target)
    launchers: dict[str, Kernels] = {"binary": BinaryKernels(compiled)}
    return launchers | ({"source": SourceKernels(variant, compiled.config)} if from_source else {})


def replay_us(run: Callable[[], None]) -> float:
    """Median microseconds of a CUDA-graph replay of ``run``."""
    import torch

    # Warm up off the default stream, as graph capture asks.
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    events = [(timer(), timer()) for _ in range(REPLAYS)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([begin.elapsed_time(end) for begin, end in events])) * 1e3


def timer() -> torch.cuda.Event:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def copy_bytes_per_s() -> float:
    """Bandwidth of a device copy of 1 GiB, reads and writes counted."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)

    return 2 * source.numel() / (replay_us(run) * 1e-6)


def time_attention(copy: float, device: str = "cuda") -> Iterator[Timing]:
    """Every shape, batch, context and tree size in bf16, one layer, with the binary if there is one."""
    for shape in SHAPES:
        for batch in BATCHES:
            for context in CONTEXTS:
                for tree in TREES:
                    yield time_case(shape, batch, context, tree, copy, device)


def time_case(shape: str, batch: int, context: int, tree: int, copy: float, device: str) -> Timing:
    """Time one layer: our kernels over a paged cache, and SDPA over K/V that are already contiguous."""
    import torch

    from flexspec.kernels.gpu.attention.check import AttentionCase, RequestRows, make_inputs, scale_of
    from flexspec.kernels.gpu.attention.launch import step_tables, tree_attention
    from flexspec.types import DType

    heads, kv_heads, head_dim = SHAPES[shape]
    tile = 64 if tree * heads // kv_heads > 16 else 16
    case = AttentionCase(
        shape, heads, kv_heads, head_dim, (RequestRows("tree", context, tree),) * batch, DType.BF16, row_tile=tile
    )
    inputs = make_inputs(case, 0, device)
    kernels = next(iter(kernels_for(case.variant(), device, from_source=False).values()))
    tables = step_tables(
        case.variant(), inputs.page_table_RB, inputs.starts_R1, inputs.contexts_R, inputs.causal_R,
        inputs.ancestors_TW, device,
    )  # fmt: skip
    kv_bytes = 2 * batch * (context + tree) * kv_heads * head_dim * 2
    layers = max(2, -(-CACHE_BYTES // kv_bytes))
    caches = [(inputs.k_cache.clone(), inputs.v_cache.clone()) for _ in range(layers)]

    def run() -> None:
        for k_cache, v_cache in caches:
            tree_attention(kernels, inputs.q_THD, k_cache, v_cache, tables, scale_of(case))

    kernel_us = replay_us(run) / layers
    caches.clear()
    moved = kv_bytes + 2 * inputs.q_THD.numel() * 2
    sdpa_us = time_sdpa(case, layers, device)
    torch.cuda.empty_cache()
    rate = moved / (kernel_us * 1e-6)
    return Timing(shape, batch, context, tree, round(kernel_us, 2), rate, round(rate / copy, 3), round(sdpa_us, 2))


def time_sdpa(case: AttentionCase, layers: int, device: str) -> float:
    """torch's SDPA with a boolean mask and grouped heads on contiguous [batch, G, S, D] K and V."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    batch, (request, *_) = len(case.requests), case.requests
    keys = request.context + request.tokens

    def random(heads: int, rows: int) -> torch.Tensor:
        return torch.randn(batch, heads, rows, case.head_dim, device=device, dtype=torch.bfloat16)

    q = random(case.heads, request.tokens)
    caches = [(random(case.kv_heads, keys), random(case.kv_heads, keys)) for _ in range(layers)]
    mask = torch.ones(request.tokens, keys, dtype=torch.bool, device=device).tril(request.context)

    def run() -> None:
        for k, v in caches:
            scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=case.heads != case.kv_heads)

    return replay_us(run) / layers
