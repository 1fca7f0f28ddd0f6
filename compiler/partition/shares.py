"""Which rank has which part: the axes along which a graph is cut, each rank's range, the recipe for its weights.

An axis is anything that the ranks of a stage divide by one set of ranges: attention heads, ffn columns, the vocabulary.
Sizes need not be divisible: shares differ by at most one unit, and the first ranks have the larger ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import TYPE_CHECKING

from flexspec.arithmetic import ceil_div
from flexspec.errors import PartitionError, WeightError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Range = tuple[int, int]  # first, end (exclusive)


def even_ranges(units: int, parts: int) -> tuple[Range, ...]:
    """``units`` divided into ``parts`` ranges whose lengths differ by at most one; ``parts`` is at most ``units``."""
    assert 0 < parts <= units, f"{units} units in {parts} parts"
    least, more = divmod(units, parts)
    starts = [part * least + min(part, more) for part in range(parts + 1)]
    return tuple(zip(starts, starts[1:], strict=False))


def head_ranges(heads: int, kv_heads: int, parts: int) -> tuple[Range, ...]:
    """Query heads of each rank: all those of some kv heads, or some of one kv head's if ranks outnumber kv heads.

    Attention has equally many query heads for every kv head, so no rank may have one kv head's queries and half of the
    next one's. 9 heads with 3 kv heads are 6 and 3 on 2 ranks; 2, 1, 3 and 3 on 4 ranks.
    """
    share = heads // kv_heads
    if parts <= kv_heads:
        return tuple((share * first, share * end) for first, end in even_ranges(kv_heads, parts))
    ranks_of = even_ranges(parts, kv_heads)
    return tuple(
        (share * kv_head + first, share * kv_head + end)
        for kv_head, (low, high) in enumerate(ranks_of)
        for first, end in even_ranges(share, high - low)
    )


class Axis:
    """An axis. Axes are united while layouts are chosen (union-find)."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.extents: set[int] = set()  # sizes of its dims, multiples of the smallest (8 heads: 8, and 8 * 64 columns)
        self.blocks: dict[int, int] = {}  # extent -> entries of a block: cuts are allowed only between blocks
        self.covers: Axis | None = None  # the axis whose ranges determine this one's, which may overlap
        self.covered_by: list[Axis] = []
        self.must_tile = False  # no overlaps: a sum or gather over it would count shared parts twice
        self._same: Axis | None = None

    def root(self) -> Axis:
        axis = self
        while axis._same is not None:
            axis = axis._same
        return axis

    def see(self, extent: int, block: int = 1) -> None:
        """Record that the axis runs along a dim of this size, to be cut only between blocks of ``block`` entries."""
        axis = self.root()
        axis.extents.add(extent)
        axis.blocks[extent] = lcm(block, axis.blocks.get(extent, 1))

    def unite(self, other: Axis) -> None:
        """Make both one axis. Raises PartitionError if one covers the other."""
        root, joined = self.root(), other.root()
        if root is joined:
            return
        covered = [axis.covers.root() for axis in (root, joined) if axis.covers is not None]
        if root in covered or joined in covered or (len(covered) == 2 and covered[0] is not covered[1]):
            raise PartitionError(
                f"{root.label} and {joined.label} are cut alike, and one of them as the other's kv heads",
                "a graph whose queries and keys are separate values",
                "cut the graph before the passes that fuse its operators",
            )
        root.extents |= joined.extents
        for extent, block in joined.blocks.items():
            root.see(extent, block)
        root.covered_by += joined.covered_by
        root.covers = root.covers or joined.covers
        root.must_tile |= joined.must_tile
        joined._same = root

    def cover(self, other: Axis) -> None:
        """Derive this axis' ranges from those of ``other``. Raises PartitionError if both are one axis."""
        covering, covered = self.root(), other.root()
        others = covering.covers and covering.covers.root() is not covered
        if covering is covered or covered.covers is not None or others:
            raise PartitionError(
                f"{covering.label} and {covered.label} are cut alike, and one of them as the other's kv heads",
                "a graph whose queries and keys are separate values",
                "cut the graph before the passes that fuse its operators",
            )
        covering.covers = covered
        covered.covered_by.append(covering)

    def units(self) -> int:
        """The number of indivisible units: entries of the smallest extent, or groups of them that make whole blocks.

        Raises PartitionError if another extent is not a multiple of the smallest.
        """
        axis = self.root()
        least = min(axis.extents)
        odd = [extent for extent in sorted(axis.extents) if extent % least]
        if odd:
            raise PartitionError(
                f"{axis.label}: sizes {least} and {odd[0]} cut alike",
                "sizes that are multiples of one another",
                "correct the model's sizes, or plan this stage with one rank",
            )
        # A cut between blocks of a dim that is n times as long lies between every block / gcd(block, n) entries.
        step = lcm(*(block // gcd(block, extent // least) for extent, block in axis.blocks.items()))
        return least if step == 1 else axis._units_of_blocks(least, step)

    def _units_of_blocks(self, least: int, step: int) -> int:
        """The most units that ``step`` allows without a unit that has part of two kv heads' queries."""
        groups = min((covering.root().units() for covering in self.covered_by), default=1)
        counts = (least // size for size in range(step, least + 1, step) if least % size == 0)
        return next(count for count in counts if count % groups == 0 or groups % count == 0)

    def ranges(self, degree: int) -> tuple[Range, ...]:
        """The units of each rank. Raises PartitionError if there are fewer units than ranks."""
        axis, units = self.root(), self.units()
        if axis.covers is not None:
            covered = axis.covers.root()
            return tuple(
                (first * units // covered.units(), ceil_div(end * units, covered.units()))
                for first, end in covered.ranges(degree)
            )
        if units < degree:
            raise PartitionError(
                f"{axis.label} has {units} parts to cut, for {degree} ranks",
                f"a tensor-parallel degree of at most {units}",
                "give the stage fewer ranks",
            )
        groups = min((covering.root().units() for covering in axis.covered_by), default=units)
        return head_ranges(units, groups, degree) if units % groups == 0 else even_ranges(units, degree)

    def share(self, extent: int, degree: int, part: int) -> Range:
        """The range of the stage's rank ``part`` along a dim of this size."""
        first, end = self.ranges(degree)[part]
        scale = extent // self.units()
        return first * scale, end * scale

    def check(self, degree: int) -> None:
        """Raise PartitionError if ranks share a part of an axis that is summed or gathered over all of them."""
        ranges = self.ranges(degree)
        tiled = all(end == first for (_, end), (first, _) in zip(ranges, ranges[1:], strict=False))
        if self.root().must_tile and not tiled:
            raise PartitionError(
                f"{self.root().label} is summed or gathered over {degree} ranks, some of which share a part",
                f"a degree of at most {self.units()} there",
                "give the stage fewer ranks",
            )


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """How a rank's weight is cut from the model's."""

    name: str  # in the rank's graph
    source: str  # the model's weight
    source_dims: tuple[int, ...]
    dim: int | None = None  # the one that is cut; None: the whole weight
    first: int = 0  # along dim
    end: int = 0  # exclusive
    zeros: bool = False  # zeros instead: a bias must count once in a sum over ranks, and another rank has it

    def dims(self) -> tuple[int, ...]:
        """The dims of the rank's weight."""
        if self.dim is None:
            return self.source_dims
        return (*self.source_dims[: self.dim], self.end - self.first, *self.source_dims[self.dim + 1 :])

    def take(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """The rank's part of the model's weight. Raises WeightError if its dims are not ``source_dims``."""
        if weight.shape != self.source_dims:
            raise WeightError(
                f"weight {self.source} of shape {list(weight.shape)}",
                f"{list(self.source_dims)}",
                "load the checkpoint that the graph is for",
            )
        if self.zeros:
            return weight * 0
        if self.dim is None:
            return weight
        return weight[(slice(None),) * self.dim + (slice(self.first, self.end),)]


def cut_weights(
    slices: Sequence[WeightSlice], get: Callable[[str], NDArray[np.float32]]
) -> Mapping[str, NDArray[np.float32]]:
    """The weights of one rank by their names in its graph; ``get`` returns the model's weights. Raises WeightError."""
    return {part.name: part.take(get(part.source)) for part in slices}
