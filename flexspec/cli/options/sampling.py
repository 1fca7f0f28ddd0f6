"""The sampling parameters as options of a command: one for each field of SamplingParams, spelt with dashes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from flexspec.sampling import SamplingParams, sampling_fields


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    types = get_type_hints(SamplingParams)
    for field in fields(SamplingParams):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            default=list(field.default) if isinstance(field.default, tuple) else field.default,
            help=_help(field.name, field.default),
            **_kind(types[field.name]),
        )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The parameters of a command line. Raises RequestError for one out of range."""
    return SamplingParams(**{name: getattr(args, name) for name in sampling_fields()})


def _kind(kind: Any) -> dict[str, Any]:
    """argparse's arguments for a field of that type."""
    if kind is bool:
        return {"action": "store_true"}
    if kind == Sequence[str]:
        return {"action": "append"}
    return {"type": int if kind == int | None else kind}


def _help(name: str, default: object) -> str:
    about = sampling_fields()[name].help
    if default is False or default is None:
        return about
    return f"{about}; may be repeated" if default == () else f"{about} (default {default:g})"
