"""Who holds which part: the axes along which a graph is cut, the range of each rank, and the recipe of its weights.

An axis is anything that is divided among the ranks of a stage under one set of ranges: attention heads, ffn columns,
the vocabulary. Sizes need not divide: shares differ by one unit at most, first ranks hold the larger ones.
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

Range = tuple[int, int]  # first, end (not included)


def even_ranges(units: int, parts: int) -> tuple[Range, ...]:
    """``units`` in ``parts`` runs whose lengths differ by one at most; ``parts`` is at most ``units``."""
    assert 0 < parts <= units, f"{units} units in {parts} parts"
    least, more = divmod(units, parts)
    starts = [part * least + min(part, more) for part in range(parts + 1)]
    return tuple(zip(starts, starts[1:], strict=False))


def head_ranges(heads: int, kv_heads: int, parts: int) -> tuple[Range, ...]:
    """Query heads of each rank: those of whole kv heads, or a part of one kv head's where ranks outnumber kv heads.

    Attention takes equally many query heads to each kv head, so that no rank may hold one kv head's queries and half of
    the next's. 9 heads with 3 kv heads on 2 ranks are 6 and 3, on 4 ranks 2, 1, 3 and 3.
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
    """One axis, growing together while layouts are chosen (union-find).

    ``extents`` are the sizes it was seen with, multiples of their least (8 heads: 8, and 8 * 64 columns). An axis that
    covers another has its ranges follow from that one's; they may overlap.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.extents: set[int] = set()
        self.blocks: dict[int, int] = {}  # by extent: it may be cut only between blocks of so many entries
        self.covers: Axis | None = None
        self.covered_by: list[Axis] = []
        self.must_tile = False  # a sum or a join over it would count a shared part twice
        self._same: Axis | None = None

    def root(self) -> Axis:
        axis = self
        while axis._same is not None:
            axis = axis._same
        return axis

    def see(self, extent: int, block: int = 1) -> None:
        """The axis runs along a dim of this size, which is cut between blocks of ``block`` entries."""
        axis = self.root()
        axis.extents.add(extent)
        axis.blocks[extent] = lcm(block, axis.blocks.get(extent, 1))

    def unite(self, other: Axis) -> None:
        """From now on both are one axis. Raises PartitionError when one covers the other."""
        mine, theirs = self.root(), other.root()
        if mine is theirs:
            return
        covered = [axis.covers.root() for axis in (mine, theirs) if axis.covers is not None]
        if mine in covered or theirs in covered or (len(covered) == 2 and covered[0] is not covered[1]):
            raise PartitionError(
                f"{mine.label} and {theirs.label} are cut alike, and one of them as the other's kv heads",
                "a graph whose queries and keys are separate values",
                "cut the graph before the passes that fuse its operators",
            )
        mine.extents |= theirs.extents
        for extent, block in theirs.blocks.items():
            mine.see(extent, block)
        mine.covered_by += theirs.covered_by
        mine.covers = mine.covers or theirs.covers
        mine.must_tile |= theirs.must_tile
        theirs._same = mine

    def cover(self, other: Axis) -> None:
        """From now on this axis' ranges follow from those of ``other``."""
        mine, theirs = self.root(), other.root()
        if mine is theirs or theirs.covers is not None or (mine.covers and mine.covers.root() is not theirs):
            raise PartitionError(
                f"{mine.label} and {theirs.label} are cut alike, and one of them as the other's kv heads",
                "a graph whose queries and keys are separate values",
                "cut the graph before the passes that fuse its operators",
            )
        mine.covers = theirs
        theirs.covered_by.append(mine)

    def units(self) -> int:
        """What cannot be cut further: entries of the least extent, or as many of them as make whole blocks.

        Raises PartitionError when another extent is not a multiple of the least.
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
        """As many units as ``step`` allows such that one never holds parts of two kv heads' queries."""
        groups = min((covering.root().units() for covering in self.covered_by), default=1)
        counts = (least // size for size in range(step, least + 1, step) if least % size == 0)
        return next(count for count in counts if count % groups == 0 or groups % count == 0)

    def ranges(self, degree: int) -> tuple[Range, ...]:
        """The units of each rank. Raises PartitionError when there are fewer units than ranks."""
        axis, units = self.root(), self.units()
        if axis.covers is not None:
            whole = axis.covers.root()
            return tuple(
                (first * units // whole.units(), ceil_div(end * units, whole.units()))
                for first, end in whole.ranges(degree)
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
        """What rank number ``part`` of the stage holds along a dim of this size."""
        first, end = self.ranges(degree)[part]
        scale = extent // self.units()
        return first * scale, end * scale

    def check(self, degree: int) -> None:
        """Raise PartitionError if ranks share a part of what is summed or joined over all of them."""
        ranges = self.ranges(degree)
        tiled = all(end == first for (_, end), (first, _) in zip(ranges, ranges[1:], strict=False))
        if self.root().must_tile and not tiled:
            raise PartitionError(
                f"{self.root().label} is summed or joined over {degree} ranks, some of which hold the same part",
                f"a degree of at most {self.units()} there",
                "give the stage fewer ranks",
            )


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """How a rank's weight is made: entries ``first`` to ``end`` of ``source`` along ``dim``; dim None is all of it.

    ``zeros``: the rank adds nothing, another holds the weight (a bias that must count once in a sum over ranks).
    ``source_dims`` are the dims of the whole weight.
    """

    name: str
    source: str
    source_dims: tuple[int, ...]
    dim: int | None = None
    first: int = 0
    end: int = 0
    zeros: bool = False

    def dims(self) -> tuple[int, ...]:
        """The dims of what the rank holds."""
        if self.dim is None:
            return self.source_dims
        return (*self.source_dims[: self.dim], self.end - self.first, *self.source_dims[self.dim + 1 :])

    def take(self, whole: NDArray[np.float32]) -> NDArray[np.float32]:
        """The rank's part of the whole weight. Raises WeightError for a weight of other dims."""
        if whole.shape != self.source_dims:
            raise WeightError(
                f"weight {self.source} of shape {list(whole.shape)}",
                f"{list(self.source_dims)}",
                "load the checkpoint that the graph is for",
            )
        if self.zeros:
            return whole * 0
        if self.dim is None:
            return whole
        return whole[(slice(None),) * self.dim + (slice(self.first, self.end),)]


def cut_weights(
    slices: Sequence[WeightSlice], get: Callable[[str], NDArray[np.float32]]
) -> Mapping[str, NDArray[np.float32]]:
    """The weights of one rank by their names in its graph; ``get`` gives a whole weight. Raises WeightError."""
    return {each.name: each.take(get(each.source)) for each in slices}
