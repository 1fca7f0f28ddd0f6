"""Compile the attention kernels of common models for every target, without a GPU, and print their resources.

    python benchmarks/triton_resources.py [--targets sm_90,gfx942] [--json FILE]

The table of docs/design/triton-kernels.md is the output of this script. Takes a few minutes the first time.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # so that it also runs where flexspec is not installed

from flexspec.kernels.gpu.aot import compile_variants, resource_rows, triton_version  # noqa: E402
from flexspec.kernels.gpu.attention.variant import AttentionShape  # noqa: E402
from flexspec.kernels.gpu.package import format_rows  # noqa: E402
from flexspec.types import DType  # noqa: E402

SHAPES = (  # mode, query heads, kv heads, head dim, dtype, largest tree
    AttentionShape("tree_verify", 9, 3, 64, DType.BF16, 64),  # SmolLM2 135M
    AttentionShape("tree_verify", 32, 4, 64, DType.BF16, 64),  # TinyLlama
    AttentionShape("tree_verify", 32, 32, 80, DType.BF16, 64),
    AttentionShape("tree_verify", 32, 8, 96, DType.BF16, 64),
    AttentionShape("tree_verify", 32, 32, 128, DType.BF16, 64),  # Llama 2 7B
    AttentionShape("tree_verify", 32, 8, 128, DType.BF16, 64),  # Llama 3 8B, Mistral 7B
    AttentionShape("tree_verify", 28, 4, 128, DType.BF16, 64),  # Qwen2.5 7B
    AttentionShape("tree_verify", 32, 8, 128, DType.BF16, 256),  # four ancestor words
    AttentionShape("tree_verify", 32, 8, 192, DType.BF16, 64),
    AttentionShape("tree_verify", 16, 4, 256, DType.BF16, 64),
    AttentionShape("tree_verify", 32, 8, 128, DType.F16, 64),
    AttentionShape("tree_verify", 9, 3, 64, DType.F32, 64),
    AttentionShape("tree_verify", 32, 8, 128, DType.F32, 64),
    AttentionShape("incremental", 9, 3, 64, DType.BF16, 1),
    AttentionShape("incremental", 32, 8, 128, DType.BF16, 1),
    AttentionShape("incremental", 16, 4, 256, DType.BF16, 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="sm_80,sm_90,sm_100,gfx942", help="comma-separated (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    variants = [shape.variant() for shape in SHAPES]
    compiled = compile_variants(
        variants, args.targets.split(","), progress=lambda text: print(f"compiled {text}", file=sys.stderr)
    )
    rows = [row for row in resource_rows(compiled) if row["kernel"] == "attend"]
    print(f"triton {triton_version()}")
    print(format_rows(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
