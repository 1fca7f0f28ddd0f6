"""``flexspec compile MODEL [--ssm DIR]... -o X.fspec``"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

EPILOG = """\
example:
  flexspec compile build/models/SmolLM2-135M-Instruct.Q4_1.gguf --ssm ssm/smollm2-135m -o build/smollm2.fspec
(`make demo` puts the model there)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from flexspec.cli.running import draft_plans_help

    parser.epilog = f"{draft_plans_help()}\n{EPILOG}"
    parser.add_argument("model", type=Path, help="a .gguf file or a Hugging Face folder")
    parser.add_argument("--ssm", type=Path, action="append", default=[], help="an SSM folder; may be repeated")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the artifact to write, NAME.fspec")
    parser.add_argument(
        "--plan",
        type=Path,
        help="a plan of several ranks, from flexspec plan -o or TOML by hand: adds each rank's program and weights",
    )
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16", help="weights and KV cache (default bf16)")
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        help="also compile GPU kernels: sm_80, sm_90, sm_100, gfx942; repeat or separate by commas",
    )
    parser.add_argument(
        "--isa",
        action="append",
        default=[],
        help="CPU instruction sets: amx, avx512, avx2, generic (default: all here), or none: an artifact for --target "
        "alone, which needs no C++ compiler",
    )
    parser.add_argument(
        "--draft",
        metavar="PLAN",
        help="draft plan stored in the artifact: off, chain:DEPTH, tree:K1,K2,... or budget:NODES, with options; see "
        "below (default: budget:24 over all sources)",
    )
    parser.add_argument("--max-tree", type=int, default=64, help="largest token tree the GPU kernels take (default 64)")
    parser.add_argument("--dump-ir", type=Path, help="write the graph after every pass into this folder")


def run(args: argparse.Namespace) -> int:
    from flexspec.cli.progress import progress_bars
    from flexspec.compiler.planner.plan_file import read_plan
    from flexspec.draft_plan import DraftLadder, DraftPlan, default_draft
    from flexspec.errors import CompileError
    from flexspec.kernels.package.compile_model import CompileOptions, compile_model
    from flexspec.types import DType

    targets = _split(args.target)
    isas = _isas(_split(args.isa))
    if not 1 <= args.max_tree <= 512:
        raise CompileError(f"--max-tree {args.max_tree}", "1 to 512 nodes", "choose a size in that range")
    draft = DraftPlan.parse(args.draft) if args.draft else default_draft(len(args.ssm))
    plan = read_plan(args.plan, len(args.ssm), draft) if args.plan else None
    if plan is not None and args.draft:
        plan = replace(plan, ladder=DraftLadder.of(draft), micro_batches=())
    elif plan is not None:
        draft = plan.ladder.for_batch(1)
    options = CompileOptions(DType(args.dtype), targets, isas, draft, args.max_tree, args.dump_ir, plan)
    argv = ["flexspec", *sys.argv[1:]]
    with progress_bars() as progress:
        path, rows = compile_model(args.model, args.ssm, args.output, options, argv=argv, progress=progress)
    if rows:
        from flexspec.kernels.gpu.package import format_rows

        print(format_rows(rows))
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    print(f"{path}: {size / 1e6:.0f} MB, draft plan {draft}")
    return 0


def _isas(names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Instruction sets as CompileOptions takes them. Raises CompileError for a name of none."""
    from flexspec.errors import CompileError
    from flexspec.kernels.cpu.build import ISA_FLAGS

    if names == ("none",):
        return ()
    unknown = [name for name in names if name not in ISA_FLAGS]
    if unknown:
        known = f"one of {', '.join(ISA_FLAGS)}, or none alone"
        raise CompileError(f"--isa {unknown[0]}", known, "correct the name")
    return names or None


def _split(values: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.strip() for value in values for item in value.split(",") if item.strip()))
