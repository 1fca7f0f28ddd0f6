"""Typed reading of configuration tables (config.json, GGUF metadata) with errors that name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexspec.checked_table import show
from flexspec.errors import ModelConfigError

_MAX_SIZE = 1 << 31


class Settings:
    """A read-only view of a table whose keys are open: others define them, and most do not concern us.

    That is why it is no checked_table.Table, which refuses what nobody reads. ``None`` counts as absent; a value of the
    wrong type is a ModelConfigError.

    ``aliases``: the file's names of keys, where they differ from ours (``{"intermediate_size": "ffn_dim"}``).
    """

    __slots__ = ("_aliases", "_path", "_table")

    def __init__(self, table: Mapping[str, Any], path: Path, aliases: Mapping[str, str] | None = None) -> None:
        self._table = table
        self._path = path
        self._aliases = aliases or {}

    def with_keys(self, aliases: Mapping[str, str]) -> Settings:
        """The same table, with these names of keys."""
        return Settings(self._table, self._path, aliases)

    def __contains__(self, key: str) -> bool:
        return self.raw(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is an explicit null, which for some keys means "off" rather than "default"."""
        return self._name(key) in self._table and self.raw(key) is None

    def raw(self, key: str) -> Any:
        return self._table.get(self._name(key))

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least ``least``; required when ``default`` is None."""
        value = self._get(key, default)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value < _MAX_SIZE:
            raise self.error(key, f"an integer from {least} to {_MAX_SIZE - 1}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """A finite number, above zero unless ``positive`` is false; required when ``default`` is None."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or (positive and value <= 0):
            raise self.error(key, "a finite positive number" if positive else "a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of strings")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of non-negative integers; empty when absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < _MAX_SIZE for item in value):
            raise self.error(key, "a list of non-negative integers")
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of ids; empty when absent. Negative ids (older files' "none") are dropped."""
        value = self._get(key, [])
        items = value if isinstance(value, list) else [value]
        if not all(type(item) is int and item < _MAX_SIZE for item in items):
            raise self.error(key, "a token id or a list of token ids")
        return tuple(item for item in items if item >= 0)

    def error(self, key: str, expected: str, fix: str = "correct the file, or download it again") -> ModelConfigError:
        value, key = self.raw(key), self._name(key)
        found = f"{self._path} has no {key}" if value is None else f"{self._path} has {key} = {show(value)}"
        return ModelConfigError(found, expected, fix)

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        return default if value is None else value

    def _name(self, key: str) -> str:
        return self._aliases.get(key, key)


def check_sliding_window(window: int | None, max_positions: int) -> None:
    """Refuse a model that limits attention to a window shorter than its context; None or 0 is no window.

    A ModelConfig has no window: attention reads every committed token.
    """
    if window and window < max_positions:
        raise ModelConfigError(
            f"sliding_window={window} with a context of {max_positions} tokens",
            "full attention over the context",
            f"load the model with max_positions of at most {window}, or use a model without a sliding window",
        )
