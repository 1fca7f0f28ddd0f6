"""``flexspec compile MODEL [--ssm DIR]... -o X.fspec``"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EPILOG = """\
example:
  flexspec compile build/models/SmolLM2-135M-Instruct.Q4_1.gguf --ssm ssm/smollm2-135m -o build/smollm2.fspec
(`make demo` puts the model there)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from flexspec.cli.options.dtype import add_dtype_options
    from flexspec.cli.running import draft_plans_help
    from flexspec.kernels.package.devices.registry import known_targets

    parser.epilog = f"{draft_plans_help()}\n{EPILOG}"
    parser.add_argument("model", type=Path, help="a .gguf file or a Hugging Face folder")
    parser.add_argument("--ssm", type=Path, action="append", default=[], help="an SSM folder; may be repeated")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the artifact to write, NAME.fspec")
    parser.add_argument(
        "--plan",
        type=Path,
        help="a plan with several ranks, from flexspec plan -o or hand-written (TOML): adds each rank's program and "
        "weights",
    )
    add_dtype_options(parser)
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        help=f"also compile for {', '.join(known_targets())}; may be repeated, or separated by commas",
    )
    parser.add_argument(
        "--isa",
        action="append",
        default=[],
        help="CPU instruction sets: amx, avx512, avx2, generic (default: all of this machine's architecture), or none: "
        "an artifact for --target alone, which needs no C++ compiler",
    )
    parser.add_argument(
        "--draft",
        metavar="PLAN",
        help="draft plan stored in the artifact: off, chain:DEPTH, tree:K1,K2,... or budget:NODES, with options; see "
        "below (default: budget:24 over all sources)",
    )
    parser.add_argument("--max-tree", type=int, default=64, help="largest token tree for the GPU kernels (default 64)")
    parser.add_argument("--dump-ir", type=Path, help="write the graph after every pass to this folder")


def run(args: argparse.Namespace) -> int:
    from flexspec.api.compile import compile
    from flexspec.cli.progress import progress_bars

    with progress_bars() as progress:
        artifact = compile(
            args.model,
            out=args.output,
            ssm=args.ssm,
            plan=args.plan,
            dtype=args.dtype,
            weights=args.weights,
            targets=_split(args.target),
            isas=_split(args.isa) or None,
            draft=args.draft,
            max_tree=args.max_tree,
            dump_ir=args.dump_ir,
            command=["flexspec", *sys.argv[1:]],
            progress=progress,
        )
    if artifact.gpu_kernels:
        from flexspec.kernels.gpu.package import format_rows

        print(format_rows(list(artifact.gpu_kernels)))
    print(f"{artifact.path}: {artifact.size_bytes / 1e6:.0f} MB, draft plan {artifact.draft}")
    return 0


def _split(values: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.strip() for value in values for item in value.split(",") if item.strip()))
