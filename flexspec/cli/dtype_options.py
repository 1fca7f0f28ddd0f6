"""--dtype and --weights, alike in the commands that build a model's graph."""

from __future__ import annotations

import argparse

DEFAULT_DTYPE = "bf16"


def add_dtype_options(parser: argparse.ArgumentParser, *, default: str | None = DEFAULT_DTYPE) -> None:
    """``default``: None where it matters whether --dtype was given."""
    from flexspec.weight_formats.registry import format_names

    parser.add_argument(
        "--dtype",
        choices=("bf16", "f32"),
        default=default,
        help=f"activations and KV cache, and weights without --weights (default {DEFAULT_DTYPE})",
    )
    parser.add_argument(
        "--weights",
        choices=format_names(),
        metavar="FORMAT",
        help=f"how weight matrices are stored: {', '.join(format_names())} (default: as --dtype); products expand them",
    )
