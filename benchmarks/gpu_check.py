"""Check the generated kernels on this machine's GPU, then time tree attention. No network, under five minutes.

    python benchmarks/gpu_check.py                 # or: make gpu-check
    python benchmarks/gpu_check.py --interpret     # only the checks, on the CPU, in Triton's interpreter

Needs torch >= 2.11 and triton >= 3.6 on a CUDA machine. Prints tables and writes build/gpu_check.json. Exit code 0: all
checks passed; 1: one failed; 2: no CUDA device. Timings are medians of CUDA-graph replays that walk over more KV than
the L2 cache holds; the copy bandwidth that they are compared with is measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # for benchmarks, and so that it also runs where flexspec is not installed

from benchmarks.gpu_timing import copy_bytes_per_s, gpu_target, kernels_for, time_attention  # noqa: E402

if TYPE_CHECKING:
    from flexspec.graph import Graph
    from flexspec.kernels.gpu.attention.check import AttentionCase


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
    if device == "cuda" and (target := gpu_target()) is not None:
        from benchmarks.gpu_serve import differences

        served = differences(target, "cuda").items()
        checks += [Check(f"tiny artifact, draft {draft}", "generate", count, 0) for draft, count in served]
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
    """The machine of the figures."""
    import torch
    import triton

    name = torch.cuda.get_device_name() if device == "cuda" else f"interpreter on {platform.machine()}"
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def check_kernels(device: str) -> Iterator[Check]:
    """Every case of every kernel family against its reference; in the interpreter only those that it can compute."""
    from flexspec.errors import CompileError
    from flexspec.kernels.gpu.aot import compile_variants
    from flexspec.kernels.gpu.family import families

    cases = [case for family in families().values() for case in family.cases(device == "cpu")]
    target = gpu_target() if device == "cuda" else None
    if target is not None:  # all at once, in as many processes as the cores allow
        print(f"compiling {len({case.variant() for case in cases})} variants for {target}", flush=True)
        try:
            compile_variants([case.variant() for case in cases], [target])
        except CompileError as error:
            print(error)  # and the cases of that variant fail below
    for case in cases:
        try:
            launchers = kernels_for(case.variant(), device, from_source=case.from_source)
        except CompileError:
            yield Check(case.label, "none", float("inf"), case.limit)
            continue
        for launcher, kernels in launchers.items():
            yield Check(case.label, launcher, case.error(kernels, device), case.limit)


def check_bits(device: str) -> Iterator[Check]:
    """A row's bits do not depend on the rows beside it: the error is the number of steps where they did."""
    from flexspec.kernels.gpu.attention.check import bit_case, same_bits
    from flexspec.types import DType

    cases: list[AttentionCase] = [bit_case()]
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
    from flexspec.runtime.executors.step import StepBatch
    from flexspec.runtime.executors.triton import TritonExecutor
    from flexspec.runtime.executors.triton_device import GPU, INTERPRETER
    from flexspec.runtime.reference.executor import ReferenceExecutor
    from flexspec.tree import TokenTree
    from flexspec.types import DType

    config = ModelConfig("llama", 64, 64, 2, 4, 2, 32, 96, 1e-5, 128)
    graph = build_llama(config, DType.F32)
    weights = random_weights(graph)
    reference = ReferenceExecutor(graph, weights, 2, 64)
    ours = TritonExecutor(graph, weights, 2, 64, GPU if device == "cuda" else INTERPRETER)
    error = 0.0
    tree = TokenTree((7, 11, 13, 11, 17), (-1, 0, 0, 1, 1))
    for nodes, context, causal in ((TokenTree.chain(range(30)), 0, 1), (tree, 30, 0), (TokenTree((5,), (-1,)), 33, 1)):
        if context == 33:  # accept the path 0, 1, 4 of the tree; logical and pool pages are the same here
            for executor in (reference, ours):
                executor.move_kv(np.array([30, 31, 34], np.int32), np.array([30, 31, 32], np.int32))
        batch = StepBatch(
            np.array(nodes.tokens, np.int32), context + np.array(nodes.depths, np.int32),
            np.array([0, len(nodes)], np.int32), np.array([context], np.int32), np.array([causal], np.uint8),
            np.array([[0, 1]], np.int32),
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


def print_table(rows: list[dict[str, Any]]) -> None:
    cells = [list(rows[0]), *([f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
