"""Immutable, ordered SSA graph of operators. KV caches are ordinary inputs and outputs, never hidden mutation.

Owns the data structure, its lookups and its structural hash. Rules are checked by ``verifier.py``; the text form is in
``text.py``; graphs are made by ``builder.py`` and rewritten by the passes in ``compiler/``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flexspec.types import Role, TensorType

Attr = int | float | str | bool | tuple[int, ...] | tuple[float, ...]


def as_int(value: object) -> int:
    """A dim or an attribute that a rule has already checked to be an integer."""
    assert isinstance(value, int), f"{value!r} where an integer was checked"
    return value


@dataclass(frozen=True, slots=True)
class Value:
    """A named tensor. Names are unique in a graph."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class Node:
    """One operator call: ``outputs = op(inputs) {attrs} @block``."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()  # sorted by key
    # Its decoder block, counted from 0: stages are cut between blocks. None: before, after or outside them.
    block: int | None = None

    def attr(self, key: str) -> Attr:
        """The attribute ``key``. Raises KeyError if the node does not have it."""
        for name, value in self.attrs:
            if name == key:
                return value
        raise KeyError(f"{self.op} has no attribute {key!r}")

    def with_attr(self, key: str, value: Attr) -> Node:
        merged = dict(self.attrs) | {key: value}
        return replace(self, attrs=tuple(sorted(merged.items())))


@dataclass(frozen=True, slots=True)
class Graph:
    """Inputs, nodes in execution order, and the names of the outputs."""

    name: str
    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    def values(self) -> Iterator[Value]:
        """All values in order of definition."""
        yield from self.inputs
        for node in self.nodes:
            yield from node.outputs

    def types(self) -> dict[str, TensorType]:
        return {value.name: value.type for value in self.values()}

    def inputs_of(self, role: Role) -> tuple[Value, ...]:
        return tuple(value for value in self.inputs if value.type.role is role)

    def producers(self) -> dict[str, int]:
        """Value name -> index of the node that defines it; graph inputs are absent."""
        return {value.name: i for i, node in enumerate(self.nodes) for value in node.outputs}

    def users(self) -> dict[str, list[int]]:
        """Value name -> indices of the nodes that read it."""
        table: dict[str, list[int]] = {value.name: [] for value in self.values()}
        for i, node in enumerate(self.nodes):
            for name in dict.fromkeys(node.inputs):
                table[name].append(i)
        return table

    def blocks(self) -> dict[str, int]:
        """Value name -> the block in which it is computed.

        A value outside the blocks belongs to the last block that it depends on; without one it is absent.
        """
        table: dict[str, int] = {}
        for node in self.nodes:
            block = node.block
            if block is None:
                block = max((table[name] for name in node.inputs if name in table), default=None)
            if block is not None:
                table.update((value.name, block) for value in node.outputs)
        return table

    def hash(self) -> str:
        """Structural hash: equal for graphs that differ only in ``name``, in the names of intermediate values, in block
        numbers, and in the order of nodes that do not depend on one another (front ends trace the same block in
        different orders, and see no block numbers).
        """
        ids: dict[str, str] = {}
        lines: list[str] = []
        for i, value in enumerate(self.inputs):
            ids[value.name] = value.name if value.type.role is Role.WEIGHT else f"#{i}"
            lines.append(f"{ids[value.name]}={value.type}")
        calls: list[str] = []
        for node in self.nodes:  # a node's identity is its whole expression down to the inputs
            types = ",".join(str(value.type) for value in node.outputs)
            call = f"{node.op}({','.join(ids[n] for n in node.inputs)}){node.attrs!r}:{types}"
            calls.append(hashlib.sha256(call.encode()).hexdigest())
            ids.update((value.name, f"{calls[-1]}.{j}") for j, value in enumerate(node.outputs))
        lines += sorted(calls)
        lines.append("return " + ",".join(ids[n] for n in self.outputs))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
