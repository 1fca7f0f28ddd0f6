"""Careful reading of a machine file's TOML: every key is asked for once, and what nobody asked for is an error."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from flexspec.errors import MachineError

_MAX_FILE_BYTES = 1 << 20
_LARGEST = 1e30
Choice = TypeVar("Choice")


class Table:
    """A TOML table at ``where`` of file ``source``. Getters raise MachineError; ``done`` refuses keys never read."""

    def __init__(self, body: Mapping[str, Any], source: str, where: str = "") -> None:
        self._body, self._source, self._where = body, source, where
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        return key in self._body

    def error(self, key: str, found: str, expected: str) -> MachineError:
        """An error about ``key`` of this table."""
        place = f"{self._where}.{key}" if self._where else key
        return MachineError(f"{self._source}: {place}: {found}", expected, "correct the machine file")

    def text(self, key: str) -> str:
        value = self._get(key, "a text in quotes")
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, f"{value!r}", "a text in quotes, not empty")
        return value

    def number(self, key: str, *, zero: bool = False) -> float:
        """A finite number above 0 (or from 0 with ``zero``)."""
        expected = "a finite number of at least 0" if zero else "a finite number above 0"
        value = self._get(key, expected)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"{value!r}", expected)
        if value < 0 or (value == 0 and not zero) or value > _LARGEST:
            raise self.error(key, f"{value!r}", expected)
        return float(value)

    def count(self, key: str, most: int) -> int:
        value = self._get(key, f"a whole number from 1 to {most}")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.error(key, f"{value!r}", f"a whole number from 1 to {most}")
        return value

    def choice(self, key: str, table: Mapping[str, Choice]) -> Choice:
        """The entry of ``table`` that the key names."""
        name = self.text(key)
        if name not in table:
            raise self.error(key, f"{name!r}", f"one of {', '.join(table) or 'none, since the file defines none'}")
        return table[name]

    def table(self, key: str) -> Table:
        value = self._get(key, "a table")
        if not isinstance(value, dict):
            shape = "a table such as {value = 1.0, correction = 1.0, origin = '...'}"
            raise self.error(key, f"{value!r}", shape)
        return Table(value, self._source, f"{self._where}.{key}" if self._where else key)

    def tables(self, key: str) -> dict[str, Table]:
        """All sub-tables of the table ``key``."""
        part = self.table(key)
        return {name: part.table(name) for name in part._body}

    def array(self, key: str) -> list[Table]:
        value = self._get(key, f"[[{key}]] tables")
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            raise self.error(key, f"{value!r}", f"one or more [[{key}]] tables")
        return [Table(item, self._source, f"{key}[{i}]") for i, item in enumerate(value)]

    def points(self, key: str) -> tuple[tuple[float, float], ...]:
        """Pairs of positive numbers, rising in the first; the second is made monotone (a longer job takes no less)."""
        expected = "two or more pairs [ideal_us, measured_us] with rising ideal_us"
        value = self._get(key, expected)
        self.text("origin")
        self.done()
        if not isinstance(value, list) or len(value) < 2:
            raise self.error(key, f"{value!r}", expected)
        pairs: list[tuple[float, float]] = []
        for item in value:
            sound = isinstance(item, list) and len(item) == 2
            if not sound or not all(type(n) in (int, float) and math.isfinite(n) and n > 0 for n in item):
                raise self.error(key, f"{item!r}", expected)
            if pairs and item[0] <= pairs[-1][0]:
                raise self.error(key, f"{item!r} after {list(pairs[-1])!r}", expected)
            pairs.append((float(item[0]), max(float(item[1]), pairs[-1][1] if pairs else 0.0)))
        return tuple(pairs)

    def done(self) -> None:
        """Refuse keys that nothing has read: a misspelt key must not be ignored."""
        for key in self._body:
            if key not in self._read:
                near = difflib.get_close_matches(key, self._read, n=1)
                hint = f"perhaps {near[0]}" if near else f"only {', '.join(sorted(self._read))}"
                raise self.error(key, "an unknown key", hint)

    def _get(self, key: str, expected: str) -> Any:
        self._read.add(key)
        if key not in self._body:
            raise self.error(key, "missing", expected)
        return self._body[key]


def read_machine_toml(path: Path) -> Table:
    """The file as a table. Raises MachineError when it cannot be read or is no TOML."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise MachineError(f"{path} has {path.stat().st_size} bytes", "at most 1 MiB", "pass a machine file")
        with path.open("rb") as file:
            return Table(tomllib.load(file), path.name)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise MachineError(f"{path}: {error}", "a readable TOML file", "correct the machine file") from None
