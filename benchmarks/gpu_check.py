"""Check the generated kernels on this machine's GPU, then time tree attention. No network, under five minutes.

    python benchmarks/gpu_check.py                 # or: make gpu-check
    python benchmarks/gpu_check.py --interpret     # the checks alone, on the CPU, in Triton's interpreter

Needs torch >= 2.11 and triton >= 3.6 on a CUDA machine. Prints tables and writes build/gpu_check.json. Exit code 0: all
checks passed; 1: one failed; 2: no CUDA device. Timings are medians of CUDA-graph replays that walk over more KV than
the L2 cache holds; the copy bandwidth they are set against is measured here too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # so that it also runs where flexspec is not installed

if TYPE_CHECKING:
    import torch

    from flexspec.graph import Graph
    from flexspec.kernels.attention_check import Case
    from flexspec.kernels.triton_launch import Kernels
    from flexspec.kernels.triton_spec import Variant

SHAPES = {"Llama 2 7B": (32, 32, 128), "Llama 3 8B": (32, 8, 128)}  # query heads, kv heads, head dim
BATCHES, CONTEXTS, TREES = (1, 8), (512, 4096), (1, 16, 64)
CACHE_BYTES = 256 << 20  # K/V walked over by one replay at least: several times any L2 cache so far
REPLAYS = 20


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: ``error`` against ``limit``."""

    name: str
    launcher: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True, slots=True)
class Timing:
    """One attention layer. ``share`` is of the measured copy bandwidth; ``sdpa_us`` torch's SDPA with a mask."""

    shape: str
    batch: int
    context: int
    tree: int
    kernel_us: float
    bytes_per_s: float
    share: float
    sdpa_us: float


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="check on the CPU, in the interpreter; no timings")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_check.json", help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    import torch

    if not args.interpret and not torch.cuda.is_available():
        print("gpu_check: this machine has no CUDA device that torch can use; --interpret runs the checks on the CPU.")
        return 2
    device = "cpu" if args.interpret else "cuda"
    started = time.monotonic()
    checks = [*check_kernels(device), *check_bits(device), check_executor(device)]
    print_table([asdict(check) | {"": "ok" if check.passed else "FAILED"} for check in checks])
    report: dict[str, Any] = {"machine": machine(device), "checks": [asdict(check) for check in checks]}
    if device == "cuda":
        copy = copy_bytes_per_s()
        timings = list(time_attention(copy))
        print(f"\ncopy bandwidth {copy / 1e12:.2f} TB/s")
        print_table([asdict(timing) for timing in timings])
        report |= {"copy_bytes_per_s": copy, "timings": [asdict(timing) for timing in timings]}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    failed = sum(not check.passed for check in checks)
    print(f"\n{len(checks) - failed} of {len(checks)} checks passed in {time.monotonic() - started:.0f} s; {args.out}")
    return 1 if failed else 0


def machine(device: str) -> dict[str, str]:
    """What the figures belong to."""
    import torch
    import triton

    name = torch.cuda.get_device_name() if device == "cuda" else f"interpreter on {platform.machine()}"
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def gpu_target() -> str | None:
    """The ahead-of-time target of this machine's GPU, if it is a known one."""
    import torch

    from flexspec.kernels.triton_spec import TARGETS

    name = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return name if name in TARGETS else None


def kernels_for(variant: Variant, device: str, *, from_source: bool) -> dict[str, Kernels]:
    """The ways to launch a variant here: a binary compiled ahead of time, and if asked Triton's own launch."""
    from flexspec.kernels.triton_aot import compile_variant
    from flexspec.kernels.triton_launch import BinaryKernels, SourceKernels
    from flexspec.kernels.triton_spec import TileConfig

    target = gpu_target() if device == "cuda" else None
    if target is None:
        return {"interpreter" if device == "cpu" else "source": SourceKernels(variant, TileConfig(32, 4, 2))}
    compiled = compile_variant(variant, target)
    launchers: dict[str, Kernels] = {"binary": BinaryKernels(compiled)}
    return launchers | ({"source": SourceKernels(variant, compiled.config)} if from_source else {})


def check_kernels(device: str) -> Iterator[Check]:
    """Every case against float64; in the interpreter some: it is slow, and computes bf16 wrongly."""
    from flexspec.kernels.attention_check import TOLERANCE, covering_cases, edge_cases, error_of
    from flexspec.kernels.triton_aot import compile_variants
    from flexspec.types import DType

    cases = list(covering_cases() + edge_cases())
    if device == "cpu":
        cases = [case for case in covering_cases() if case.dtype is DType.F32]
    target = gpu_target() if device == "cuda" else None
    if target is not None:  # all at once, in as many processes as there are cores for
        print(f"compiling {len({case.variant() for case in cases})} variants for {target}", flush=True)
        compile_variants([case.variant() for case in cases], [target])
    for case in cases:
        # Triton compiles what it launches once more, so from source only a part: all dtypes, large and small tiles.
        from_source = case.head_dim == 128 or case in edge_cases()
        for launcher, kernels in kernels_for(case.variant(), device, from_source=from_source).items():
            name = f"{case.name} {case.dtype.value}"
            yield Check(name, launcher, error_of(case, kernels, device), TOLERANCE[case.dtype])


def check_bits(device: str) -> Iterator[Check]:
    """A row's bits do not depend on the rows beside it: the error is the number of steps where they did."""
    from flexspec.kernels.attention_check import bit_case, same_bits
    from flexspec.types import DType

    cases: list[Case] = [bit_case()]
    if device == "cuda":
        cases += [
            replace(bit_case(), dtype=dtype, head_dim=head_dim, row_tile=row_tile)
            for dtype in (DType.F16, DType.BF16)
            for head_dim, row_tile in ((80, 16), (128, 64))
        ]
    for case in cases:
        for launcher, kernels in kernels_for(case.variant(), device, from_source=False).items():
            changed = sum(not same for same in same_bits(case, kernels, device).values())
            yield Check(f"bits of a row, {case.variant().name}", launcher, changed, 0)


def check_executor(device: str) -> Check:
    """A tiny Llama in float32 on the generated kernels against the reference executor: prompt, tree, accept, token."""
    from flexspec.models.config import ModelConfig
    from flexspec.models.llama import build_llama
    from flexspec.runtime.reference_executor import ReferenceExecutor
    from flexspec.runtime.step import StepBatch
    from flexspec.runtime.triton_executor import TritonExecutor
    from flexspec.tree import TokenTree
    from flexspec.types import DType

    config = ModelConfig("llama", 64, 64, 2, 4, 2, 32, 96, 1e-5, 128)
    graph = build_llama(config, DType.F32)
    weights = random_weights(graph)
    reference = ReferenceExecutor(graph, weights, 2, 64)
    ours = TritonExecutor(graph, weights, 2, 64, device)
    error = 0.0
    tree = TokenTree((7, 11, 13, 11, 17), (-1, 0, 0, 1, 1))
    for nodes, context, causal in ((TokenTree.chain(range(30)), 0, 1), (tree, 30, 0), (TokenTree((5,), (-1,)), 33, 1)):
        if context == 33:  # accept the path 0, 1, 4 of the tree; logical and pool pages are the same here
            for executor in (reference, ours):
                executor.move_kv(np.array([30, 31, 34], np.int32), np.array([30, 31, 32], np.int32))
        batch = StepBatch(
            np.array(nodes.tokens, np.int32), context + nodes.depths(), np.array([0, len(nodes)], np.int32),
            np.array([context], np.int32), np.array([causal], np.uint8), np.array([[0, 1]], np.int32),
            nodes.ancestors(), np.arange(len(nodes), dtype=np.int32),
        )  # fmt: skip
        right, got = (executor.step(batch, want_logits=True) for executor in (reference, ours))
        assert right.logits_LV is not None and got.logits_LV is not None
        error = max(error, float(np.abs(right.logits_LV - got.logits_LV).max()))
        if not np.array_equal(right.argmax_L, got.argmax_L):
            error = float("inf")
    ours.close()
    return Check("tiny Llama, logits and greedy tokens", "executor", error, 1e-3)


def random_weights(graph: Graph) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    from flexspec.types import Role

    rng = np.random.default_rng(0)
    shapes = {value.name: [int(dim) for dim in value.type.dims] for value in graph.inputs_of(Role.WEIGHT)}
    return {name: (rng.standard_normal(shape) * 0.2).astype(np.float32) for name, shape in shapes.items()}


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
    """Every shape, batch, context and tree size in bf16, one layer, with the binary where there is one."""
    for shape in SHAPES:
        for batch in BATCHES:
            for context in CONTEXTS:
                for tree in TREES:
                    yield time_case(shape, batch, context, tree, copy, device)


def time_case(shape: str, batch: int, context: int, tree: int, copy: float, device: str) -> Timing:
    """Time one layer: our kernels over a paged cache, and SDPA over K/V that already lie together."""
    import torch

    from flexspec.kernels.attention_check import Case, Part, make_inputs, scale_of
    from flexspec.kernels.tree_attention import step_tables, tree_attention
    from flexspec.types import DType

    heads, kv_heads, head_dim = SHAPES[shape]
    tile = 64 if tree * heads // kv_heads > 16 else 16
    case = Case(shape, heads, kv_heads, head_dim, (Part("tree", context, tree),) * batch, DType.BF16, row_tile=tile)
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


def time_sdpa(case: Case, layers: int, device: str) -> float:
    """torch's SDPA with a boolean mask and grouped heads on contiguous [batch, G, S, D] K and V."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    batch, (part, *_) = len(case.parts), case.parts
    keys = part.context + part.tokens

    def random(heads: int, rows: int) -> torch.Tensor:
        return torch.randn(batch, heads, rows, case.head_dim, device=device, dtype=torch.bfloat16)

    q = random(case.heads, part.tokens)
    caches = [(random(case.kv_heads, keys), random(case.kv_heads, keys)) for _ in range(layers)]
    mask = torch.ones(part.tokens, keys, dtype=torch.bool, device=device).tril(part.context)

    def run() -> None:
        for k, v in caches:
            scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=case.heads != case.kv_heads)

    return replay_us(run) / layers


def print_table(rows: list[dict[str, Any]]) -> None:
    cells = [list(rows[0]), *([f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
