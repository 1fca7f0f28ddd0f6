"""--dtype and --weights, alike in the commands that build a model's graph."""

from __future__ import annotations

import argparse

DEFAULT_DTYPE = "bf16"


def add_dtype_options(parser: argparse.ArgumentParser, *, default: str | None = DEFAULT_DTYPE) -> None:
    """``default``: None if the command must know whether --dtype was passed."""
    from flexspec.weight_formats.registry import format_names

    parser.add_argument(
        "--dtype",
        choices=("bf16", "f32"),
        default=default,
        help=f"dtype of activations and KV cache, and of weights without --weights (default {DEFAULT_DTYPE})",
    )
    parser.add_argument(
        "--weights",
        choices=format_names(),
        metavar="FORMAT",
        help=f"storage format of weight matrices: {', '.join(format_names())} (default: as --dtype)",
    )
