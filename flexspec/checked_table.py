"""Checked reading of files that people edit (TOML, JSON): keys that nothing reads are errors.

Owns the checks of types and ranges; what values mean, and the class of the error, are up to the caller.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from flexspec.errors import FlexspecError

_MAX_FILE_BYTES = 1 << 20
_SMALLEST, _LARGEST = 1e-30, 1e30
_SHOWN = 120  # characters of an invalid value in a message
MAX_COUNT = (1 << 62) - 1  # of any count
Choice = TypeVar("Choice")
Record = TypeVar("Record")  # a dataclass whose fields are annotated as text (from __future__ import annotations)
Fail = Callable[[str, str], FlexspecError]  # (found, expected) -> the caller's error


class Table:
    """The table at ``where`` of file ``source``. Getters raise ``fail``'s error; ``done`` rejects keys never read."""

    def __init__(self, body: Mapping[str, Any], source: str, fail: Fail, where: str = "") -> None:
        self.body, self._source, self._fail, self._where = body, source, fail, where
        self._read: set[str] = set()

    @classmethod
    def of(cls, body: object, source: str, fail: Fail, expected: str = "an object") -> Table:
        """The table of a parsed JSON file. Raises ``fail``'s error if it is something else."""
        if not isinstance(body, dict):
            raise fail(f"{source}: a {type(body).__name__}", expected)
        return cls(body, source, fail)

    def has(self, key: str) -> bool:
        return key in self.body

    def is_null(self, key: str) -> bool:
        """Whether the key is present with the value null; a missing key is not null."""
        self._read.add(key)
        return key in self.body and self.body[key] is None

    def names(self) -> tuple[str, ...]:
        return tuple(self.body)

    def error(self, key: str, found: str, expected: str) -> FlexspecError:
        """An error about ``key`` of this table ("": about the table)."""
        place = ".".join(part for part in (self._where, key) if part)
        return self._fail(f"{self._source}: {place}: {found}" if place else f"{self._source}: {found}", expected)

    def text(self, key: str, *, blank: bool = False) -> str:
        """A text; not empty, unless ``blank`` allows that."""
        value = self._get(key, "a text in quotes")
        if not isinstance(value, str) or not (blank or value.strip()):
            raise self.error(key, show(value), "a text in quotes, not empty")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._get(key, "a list of texts")
        if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
            raise self.error(key, show(value), "a list of texts, none empty")
        return tuple(value)

    def flag(self, key: str) -> bool:
        value = self._get(key, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, show(value), "true or false")
        return value

    def number(self, key: str, *, zero: bool = False) -> float:
        """A number above 0; ``zero`` allows 0 too."""
        expected = "0, or a number from 1e-30 to 1e30" if zero else "a number from 1e-30 to 1e30"
        value = self._get(key, expected)
        if not _is_number(value) or value < 0 or (value == 0 and not zero):
            raise self.error(key, show(value), expected)
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers above 0."""
        value = self._get(key, "a list of numbers above 0")
        if not isinstance(value, list) or not all(_is_number(item) and item > 0 for item in value):
            raise self.error(key, show(value), "a list of numbers above 0")
        return tuple(float(item) for item in value)

    def count(self, key: str, most: int, least: int = 1) -> int:
        expected = f"a whole number from {least} to {most}"
        value = self._get(key, expected)
        if type(value) is not int or not least <= value <= most:
            raise self.error(key, show(value), expected)
        return value

    def counts(self, key: str, most: int, least: int = 0) -> tuple[int, ...]:
        """A list of whole numbers."""
        expected = f"a list of whole numbers from {least} to {most}"
        value = self._get(key, expected)
        if not isinstance(value, list | tuple) or not all(type(n) is int and least <= n <= most for n in value):
            raise self.error(key, show(value), expected)
        return tuple(value)

    def record(self, key: str, kind: type[Record]) -> Record:
        """The table ``key`` as a dataclass of whole numbers from 0 up and truth values, with no other keys."""
        part = self.table(key)
        read = {"int": lambda name: part.count(name, MAX_COUNT, 0), "bool": part.flag}
        values = {item.name: read[str(item.type)](item.name) for item in fields(kind)}  # type: ignore[arg-type]
        part.done()
        return kind(**values)

    def choice(self, key: str, table: Mapping[str, Choice]) -> Choice:
        """The entry of ``table`` that the key names."""
        name = self.text(key)
        if name not in table:
            raise self.error(key, show(name), f"one of {', '.join(table) or 'none, since the file defines none'}")
        return table[name]

    def table(self, key: str, shape: str = "a table") -> Table:
        value = self._get(key, shape)
        if not isinstance(value, dict):
            raise self.error(key, show(value), shape)
        return self._part(value, f"{self._where}.{key}" if self._where else key)

    def tables(self, key: str) -> dict[str, Table]:
        """All sub-tables of the table ``key``."""
        part = self.table(key)
        return {name: part.table(name) for name in part.names()}

    def array(self, key: str) -> list[Table]:
        """A list of one or more tables: [[key]] in TOML."""
        value = self._get(key, f"a list of tables, [[{key}]] in TOML")
        if not isinstance(value, list | tuple) or not value or not all(isinstance(item, dict) for item in value):
            raise self.error(key, show(value), f"one or more tables, [[{key}]] in TOML")
        where = f"{self._where}.{key}" if self._where else key
        return [self._part(item, f"{where}[{i}]") for i, item in enumerate(value)]

    def rows(self, key: str, expected: str) -> list[list[Any]]:
        """A list of lists whose items are not checked yet."""
        value = self._get(key, expected)
        if not isinstance(value, list | tuple) or not all(isinstance(item, list | tuple) for item in value):
            raise self.error(key, show(value), expected)
        return [list(item) for item in value]

    def scalars(self, key: str) -> dict[str, Any]:
        """A table of texts, booleans and finite numbers, unchanged."""
        part = self.table(key)
        for name, value in part.body.items():
            integer = type(value) is int  # counts of plans may exceed any float
            if not (value is None or isinstance(value, str | bool) or integer or _is_number(value)):
                raise part.error(name, show(value), "a text, true, false or a finite number")
        return dict(part.body)

    def points(self, key: str) -> tuple[tuple[float, float], ...]:
        """Pairs of positive numbers, increasing in the first; the second is made monotone (more work takes no less)."""
        expected = "two or more pairs [ideal_us, measured_us] with increasing ideal_us"
        value = self.rows(key, expected)
        if len(value) < 2:
            raise self.error(key, show(value), expected)
        pairs: list[tuple[float, float]] = []
        for item in value:
            if len(item) != 2 or not all(_is_number(n) and n > 0 for n in item):
                raise self.error(key, show(item), expected)
            if pairs and item[0] <= pairs[-1][0]:
                raise self.error(key, f"{show(item)} after {list(pairs[-1])!r}", expected)
            pairs.append((float(item[0]), max(float(item[1]), pairs[-1][1] if pairs else 0.0)))
        return tuple(pairs)

    def only(self, required: Collection[str], optional: Collection[str] = ()) -> None:
        """Reject other keys, then name all missing ones: a misspelt key is reported before the one it stands for."""
        self._refuse_unknown((*required, *optional))
        missing = [key for key in required if key not in self.body]
        if len(missing) > 1:  # for a single one, the getter's message says more
            raise self.error("", f"{', '.join(missing)}: missing", f"all of {', '.join(required)}")

    def done(self) -> None:
        """Reject keys that nothing has read: a misspelt key must not be ignored."""
        self._refuse_unknown(self._read)

    def _refuse_unknown(self, known: Collection[str]) -> None:
        for key in self.body:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise self.error(
                    key, "an unknown key", f"perhaps {near[0]}" if near else f"only {', '.join(sorted(known))}"
                )

    def _part(self, body: Mapping[str, Any], where: str) -> Table:
        return Table(body, self._source, self._fail, where)

    def _get(self, key: str, expected: str) -> Any:
        self._read.add(key)
        if key not in self.body:
            raise self.error(key, "missing", expected)
        return self.body[key]


def show(value: object) -> str:
    """An invalid value for a message, shortened if long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with more digits than Python prints
        text = f"a {type(value).__name__} that is too large"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read_table(path: Path, what: str, fail: Fail) -> Table:
    """A file as a table, TOML or (if named .json) JSON. Raises ``fail``'s error if it is neither or too large."""
    form = "JSON" if path.suffix == ".json" else "TOML"
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise fail(f"{path} has {path.stat().st_size} bytes", f"{what} of at most 1 MiB")
        text = path.read_text(encoding="utf-8")
        body = json.loads(text, object_pairs_hook=unique_keys) if form == "JSON" else tomllib.loads(text)
    except FileNotFoundError:
        missing = fail(f"{path}: does not exist", what)
        raise type(missing)(missing.found, missing.expected, "check the path") from None
    except (OSError, ValueError, RecursionError) as error:  # decoding errors of all three forms are ValueErrors
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise fail(f"{path}: {reason}", f"{what}, readable as {form}") from None
    if not isinstance(body, dict):
        raise fail(f"{path}: a {type(body).__name__}", f"{what}, a table of keys")
    return Table(body, str(path), fail)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json's ``object_pairs_hook``: the object as a dict. Raises ValueError for a duplicate key."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"duplicate key {key!r}")
        table[key] = value
    return table


def _is_number(value: Any) -> bool:
    """A finite number whose products with others are finite too (an integer may exceed any float)."""
    return type(value) in (int, float) and (value == 0 or _SMALLEST <= abs(value) <= _LARGEST)
