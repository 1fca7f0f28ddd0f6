"""The state of one rendering: where each value is stored, the weight table, the lines so far, and the barriers.

The files of emitters/ turn operators into calls on it; render.py drives them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flexspec.errors import CompileError
from flexspec.graph import Graph, Node
from flexspec.kernels.cpu.pack import PackedWeight, RotaryTables
from flexspec.kernels.cpu.places import Arena, Place, Roots, row_stride, width
from flexspec.kernels.cpu.weight_formats.registry import cpu_format
from flexspec.ops.bounds import IDS, POSITIONS
from flexspec.types import DType, Role
from flexspec.weight_formats.registry import format_of

BARRIER = "    c.team.barrier();"
MARK = "    c.mark("
_STEP_INTEGERS = {IDS: "s.ids", POSITIONS: "s.positions"}


@dataclass(slots=True)
class Emitter:
    """State of one rendering."""

    graph: Graph
    roots: Roots
    dtype: DType
    arena: Arena = field(default_factory=Arena)
    places: dict[str, dict[bool, Place]] = field(default_factory=dict)
    table: list[PackedWeight] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    row_local: bool = True  # everything since the last barrier only touched the thread's own rows
    layer_types: list[str] = field(default_factory=list)
    formats: set[str] = field(default_factory=set)  # names of the weight formats that its templates expand

    @property
    def elem(self) -> str:
        return "bf16" if self.dtype is DType.BF16 else "float"

    def columns(self, name: str) -> int:
        return width(self.graph, name)

    def weight(self, kind: str, names: tuple[str, ...], table: RotaryTables | None = None) -> str:
        """A pointer to float32 numbers of the weight table, which holds an entry of the same kind and names once."""
        return f"c.weight<float>({self._entry(PackedWeight(kind, names, table=table))})"

    def matrix(self, kind: str, *names: str) -> tuple[str, str]:
        """The element type and format of a product as template arguments, and a pointer to the packed matrices.

        Raises CompileError for matrices of several formats in one product.
        """
        stored = {format_of(self.graph.types()[name]).name: format_of(self.graph.types()[name]) for name in names}
        if len(stored) > 1:
            raise CompileError(
                f"weights {', '.join(names)} stored as {', '.join(stored)}",
                "one format for matrices that are multiplied together",
                "leave these products apart (the passes that fuse do), or store the weights in one format",
            )
        ((name, weight_format),) = stored.items()
        cpu_format(weight_format)  # refuses a format that no template expands
        entry = self._entry(PackedWeight(kind, names, weight_format))
        self.formats.add(name)
        return f"{self.elem}, weights::{name}", f"c.weight<char>({entry})"

    def _entry(self, wanted: PackedWeight) -> int:
        for i, entry in enumerate(self.table):
            if (entry.kind, entry.names) == (wanted.kind, wanted.names):
                return i
        self.table.append(wanted)
        return len(self.table) - 1

    def wants_elem(self, name: str) -> bool:
        """True when only matrix products read the value (in f32 models both kinds are the same storage)."""
        root = self.roots.root[name]
        return self.dtype is DType.BF16 and root in self.roots.matrix_use and root not in self.roots.other_use

    def allocate(self, name: str, *, elem: bool, columns: int | None = None) -> Place:
        columns = columns or self.columns(name)
        ld = row_stride(columns, 2 if elem else 4)
        elem = elem and self.dtype is DType.BF16
        # A matrix product reads whole tiles of k, and 0 * NaN is not 0: padding columns must stay zero for good.
        buffer = self.arena.take(ld * (2 if elem else 4), padded=columns % 32 != 0)
        place = Place(buffer, elem, ld)
        self.places.setdefault(self.roots.root[name], {})[elem] = place
        return place

    def rows(self, place: Place, *, elem_type: bool | None = None) -> str:
        is_elem = place.elem if elem_type is None else elem_type
        kind = self.elem if is_elem else "float"
        column = f" + {place.column}" if place.column else ""
        return f"Rows<{kind}>{{buf<{kind}>(c, {place.buffer}){column}, {place.ld}}}"

    def read(self, name: str, *, elem: bool) -> str:
        """Rows expression of a value in the wanted storage, converting once if it only exists in the other."""
        root = self.roots.root[name]
        have = self.places.get(root, {})
        key = elem and self.dtype is DType.BF16
        if not key and self._is_feature_input(root):
            return self._caller_rows(root)
        if key not in have:
            source = self._source(root, have, not key)
            place = self.allocate(name, elem=elem)
            kinds = (self.elem, "float") if not key else ("float", self.elem)
            self.call(
                f"copy_rows<{kinds[0]}, {kinds[1]}>(c, tid, s.T, {self.columns(name)}, {source}, {self.rows(place)})"
            )
            have = self.places[root]
        return self.rows(have[key], elem_type=elem)

    def integers(self, name: str) -> str:
        """A step input that counts or indexes, one number per row. Raises CompileError for any other value."""
        if name not in _STEP_INTEGERS:
            raise CompileError(
                f"%{name} of graph {self.graph.name} is read as numbers of rows",
                f"one of the step inputs {', '.join(_STEP_INTEGERS)}",
                "feed a step input straight into the operator",
            )
        return _STEP_INTEGERS[name]

    def _is_feature_input(self, root: str) -> bool:
        return any(v.name == root and v.type.role is Role.ACTIVATION for v in self.graph.inputs)

    def _caller_rows(self, root: str) -> str:
        """The feature input, read where the caller keeps it."""
        return f"Rows<float>{{const_cast<float*>(s.features), {self.columns(root)}}}"

    def _source(self, root: str, have: dict[bool, Place], key: bool) -> str:
        if key in have:
            return self.rows(have[key])
        if self._is_feature_input(root):
            return self._caller_rows(root)
        raise CompileError(
            f"value {root} of graph {self.graph.name} is read before a kernel writes it",
            "activations produced by operators",
            "use an operator's output or a feature input",
        )

    def call(self, text: str, *, row_local: bool = True) -> None:
        """Emit one kernel call, after a barrier unless it and all calls since the last barrier are row-local."""
        last = next((line for line in reversed(self.lines) if not line.startswith(MARK)), BARRIER)
        if not (row_local and self.row_local) and last != BARRIER:
            self.lines.append(BARRIER)
            self.row_local = True
        self.lines.append(f"    {text};")
        self.row_local = self.row_local and row_local

    def release(self, index: int) -> None:
        """Return buffers whose last reader was node ``index`` to the arena."""
        done = [root for root in self.places if self.roots.last_use.get(root, -1) == index]
        buffers = {p.buffer for root in done for p in self.places.pop(root).values()}
        live = {p.buffer for views in self.places.values() for p in views.values()}
        for buffer in sorted(buffers - live):
            self.arena.give(buffer)


Emit = Callable[[Emitter, int, Node], None]
