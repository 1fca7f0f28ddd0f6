"""The draft plan: which drafters run, the shape of their trees, and the most that they may take in a round.

Owns the parsing of the command line's form and the one worst-case function that scheduler, KV pools and context checks
all call (servers overrun their caches when one sum omits the drafts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NoReturn

from flexspec.drafters.record import draft_options, drafter_records, owner_of, source_names, ssm_names
from flexspec.errors import RequestError

METHODS = ("off", "chain", "tree", "budget")
SAMPLED = ("deterministic", "mixed")
MAX_NODES = 255  # four ancestor words with the root
MAX_DEPTH = 64
OPEN_BATCH = 1 << 30  # the last batch of a ladder: no upper limit
ROOT_CHILDREN = 8  # children of the root in a dynamic tree; more hardly raise hit rates
NODE_CHILDREN = 4  # of any other node, which itself is only reached with some chance

_SYNTAX = "off | chain:DEPTH | tree:K1,K2,... | budget:NODES, then /option=value"


@dataclass(frozen=True, slots=True)
class Expansion:
    """The shape of an SSM's token tree, level by level.

    Static: SpecInfer's expansion vector (arXiv 2305.09781 section 3). Dynamic: best-first under a beam, as in EAGLE-2
    (arXiv 2406.16858).
    """

    children: tuple[int, ...]  # of each extended node, by level
    beam: int | None  # most nodes extended on a level; None: all

    @classmethod
    def static(cls, vector: Sequence[int]) -> Expansion:
        return cls(tuple(vector), None)

    @classmethod
    def dynamic(cls, depth: int, beam: int) -> Expansion:
        return cls((ROOT_CHILDREN,) + (NODE_CHILDREN,) * (depth - 1), beam)

    def level_sizes(self) -> list[int]:
        """The most nodes made at each level."""
        sizes: list[int] = []
        extended = 1
        for children in self.children:
            sizes.append(extended * children)
            extended = sizes[-1] if self.beam is None else min(self.beam, sizes[-1])
        return sizes

    @property
    def nodes(self) -> int:
        """Nodes of the full tree, without the root."""
        return sum(self.level_sizes())

    @property
    def draft_rows(self) -> int:
        """The most rows after the committed context: the extended nodes of all levels but the last."""
        sizes = self.level_sizes()[:-1]
        return sum(sizes if self.beam is None else [min(self.beam, size) for size in sizes])

    def fitting(self, max_nodes: int, max_depth: int) -> Expansion:
        """The levels that fit completely: trees with sampled nodes must never be pruned by what was drawn."""
        total = 0
        for level, size in enumerate(self.level_sizes()):
            total += size
            if total > max_nodes or level >= max_depth:
                return Expansion(self.children[:level], self.beam)
        return self


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What a round drafts, and which part of it is verified. Raises RequestError (param "draft") if it is invalid."""

    # off: nothing is drafted. chain: the best path of the sources' merged tree, ``max_depth`` long. tree: all of it,
    # each SSM in the static shape ``vector``. budget: the nodes worth their share of the step's cost.
    method: str = "budget"
    vector: tuple[int, ...] = ()  # children of each node, by level (tree)
    max_nodes: int = 16
    max_depth: int = 8
    options: tuple[tuple[str, int], ...] = ()  # of the drafters, by name: only those that differ from their defaults
    sources: tuple[str, ...] = ("suffix", "ngram")
    sampled: str = "deterministic"  # mixed: sampled requests draw one child per node (tree of the SSM alone)

    def __post_init__(self) -> None:
        _choice("method", self.method, METHODS)
        _choice("sampled", self.sampled, SAMPLED)
        for source in self.sources:
            _choice("sources", source, source_names())
        _range("nodes", self.max_nodes, MAX_NODES)
        _range("depth", self.max_depth, MAX_DEPTH)
        values = dict(self.options)
        assert values.keys() <= {option.name for option in draft_options()}, f"options {self.options}"
        for option in draft_options():
            _range(option.name, values.get(option.name, option.default), option.highest)
        _check_owners(values, self.sources)
        changed = [(o.name, values[o.name]) for o in draft_options() if values.get(o.name, o.default) != o.default]
        object.__setattr__(self, "options", tuple(changed))
        for children in self.vector:
            _range("tree children", children, MAX_NODES)
        if (self.method == "tree") != bool(self.vector):
            _refuse(
                f"method {self.method} with vector {self.vector}",
                "a vector with method tree, and only there",
                "tree:1,1,3,1",
            )
        if self.method != "off" and (not self.sources or len(set(self.sources)) < len(self.sources)):
            _refuse(
                f"sources {self.sources}",
                f"one or more of {', '.join(source_names())}, each once",
                "budget:16/sources=suffix+ngram",
            )
        if self.method == "tree" and not _count_ssms(self):
            _refuse(f"method tree of {self.sources}", "an SSM among the sources", "tree:1,1,3,1/sources=ssm")
        if self.sampled == "mixed" and (self.method != "tree" or self.sources != ("ssm",)):
            _refuse("sampled=mixed", "method tree with the SSM as only source", "tree:2,2,1/sources=ssm/sampled=mixed")
        limits = _tree_size(self)
        if limits[0] > MAX_NODES or limits[1] > MAX_DEPTH:
            _refuse(
                f"a tree of {limits[0]} nodes, depth {limits[1]}",
                f"at most {MAX_NODES} nodes, depth {MAX_DEPTH}",
                "tree:1,1,3,1",
            )

    def with_sources(self, sources: tuple[str, ...]) -> DraftPlan:
        """The plan over these sources alone, without options of the others. Raises RequestError, as for any plan."""
        kept = tuple((name, value) for name, value in self.options if owner_of(name).is_among(sources))
        return replace(self, sources=sources, options=kept)

    def option(self, name: str) -> int:
        """The value of a drafter's option."""
        chosen = dict(self.options)
        return next(chosen.get(name, option.default) for option in draft_options() if option.name == name)

    @property
    def expansion(self) -> Expansion:
        """The shape of the SSM's own tree."""
        if self.method == "tree":
            return Expansion.static(self.vector)
        if self.method == "chain":
            return Expansion.static((1,) * self.max_depth)
        return Expansion.dynamic(min(self.option("ssm_depth"), self.max_depth), self.option("beam"))

    @classmethod
    def parse(cls, text: str, sources: tuple[str, ...] = ("suffix", "ngram")) -> DraftPlan:
        """From ``METHOD[:SIZE][/option=value]...``, as in ``budget:16/depth=8/sources=suffix+ngram+ssm``.

        Options: nodes, depth, sources, sampled and those of the drafters (flexspec/drafters/). ``sources``: of a chain
        or budget that names none. Raises RequestError naming the invalid part.
        """
        head, *options = text.strip().split("/")
        method, _, size = head.partition(":")
        _choice("method", method, METHODS)
        values: dict[str, object] = {} if method == "off" else {"sources": sources}
        values |= _parse_size(method, size, text)
        of_drafters = [option.name for option in draft_options()]
        known = [*_FIELDS, *of_drafters]
        shapes: dict[str, int] = {}
        for option in options:
            name, equals, value = option.partition("=")
            if not equals or name not in known:
                _refuse(f"draft option {option!r}", f"option=value with one of {', '.join(known)}", "budget:16/depth=8")
            if name in of_drafters:
                shapes[name] = _integer(name, value)
            else:
                field_name, read = _FIELDS[name]
                values[field_name] = read(name, value)
        return cls(**values, options=tuple(shapes.items()))  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The text that parses back to this plan; for a static tree it always names the SSMs."""
        if self.method == "off":
            return "off"
        size = {"chain": self.max_depth, "budget": self.max_nodes}.get(self.method) or ",".join(map(str, self.vector))
        head = f"{self.method}:{size}"
        default = DraftPlan.parse(head)
        for name, (field_name, _) in _FIELDS.items():
            value = getattr(self, field_name)
            if value != getattr(default, field_name) or (name == "sources" and self.method == "tree"):
                head += f"/{name}={'+'.join(value) if isinstance(value, tuple) else value}"
            if name == "depth":
                head += "".join(f"/{option}={number}" for option, number in self.options)
        return head


def default_draft(ssms: int) -> DraftPlan:
    """The draft plan that compile stores by default: all sources except those that must be named."""
    placed = (record for record in drafter_records() if record.order is not None)
    sources = tuple(source for record in placed for source in record.sources(ssms))
    return DraftPlan("budget", max_nodes=24, max_depth=8, sources=sources)


@dataclass(frozen=True, slots=True)
class WorstCase:
    """The most that one request takes in one round."""

    max_nodes: int  # drafted, without the root
    max_depth: int  # of the tree
    ssm_rows: int  # in each SSM, after its context


def worst_case(plan: DraftPlan) -> WorstCase:
    """The most that one request can take in one round under ``plan``."""
    if plan.method == "off":
        return WorstCase(0, 0, 0)
    nodes, depth = _tree_size(plan)
    return WorstCase(nodes, depth, plan.expansion.draft_rows if _count_ssms(plan) else 0)


@dataclass(frozen=True, slots=True)
class DraftLadder:
    """The draft plan of every batch size: (largest batch, plan) in ascending order; the last one has no limit."""

    rungs: tuple[tuple[int, DraftPlan], ...]

    @classmethod
    def of(cls, plan: DraftPlan) -> DraftLadder:
        """One plan for all batches."""
        return cls(((OPEN_BATCH, plan),))

    def rung_of(self, requests: int) -> int:
        """The index of the rung for a batch of this many requests."""
        fitting = (i for i, (largest, _) in enumerate(self.rungs) if requests <= largest)
        return next(fitting, len(self.rungs) - 1)

    def for_batch(self, requests: int) -> DraftPlan:
        return self.rungs[self.rung_of(requests)][1]

    @property
    def plans(self) -> tuple[DraftPlan, ...]:
        """Each plan once."""
        return tuple(dict.fromkeys(plan for _, plan in self.rungs))

    @property
    def sources(self) -> tuple[str, ...]:
        """All sources that some rung drafts with."""
        return tuple(dict.fromkeys(source for plan in self.plans if plan.method != "off" for source in plan.sources))

    @property
    def drafts(self) -> bool:
        """Whether any rung drafts."""
        return any(plan.method != "off" for plan in self.plans)

    @property
    def worst(self) -> WorstCase:
        """The most that one request can take in a round, whichever rung is in use."""
        return worst_of([worst_case(plan) for plan in self.plans])

    def __str__(self) -> str:
        if len(self.plans) == 1:
            return str(self.plans[0])
        last = len(self.rungs) - 1
        return ", ".join(f"{'more' if i == last else largest}: {plan}" for i, (largest, plan) in enumerate(self.rungs))


def worst_of(cases: Sequence[WorstCase]) -> WorstCase:
    return WorstCase(*map(max, zip(*map(astuple, cases), strict=True)))


def _count_ssms(plan: DraftPlan) -> int:
    return sum(source in ssm_names() for source in plan.sources)


def _tree_size(plan: DraftPlan) -> tuple[int, int]:
    """(nodes, depth) that a round may verify."""
    if plan.method == "chain":
        return plan.max_depth, plan.max_depth
    if plan.method == "tree":
        nodes, depth = plan.expansion.nodes * _count_ssms(plan), len(plan.vector)
        if _count_ssms(plan) < len(plan.sources):  # other sources add to the static trees, up to max_nodes in total
            return max(plan.max_nodes, nodes), max(plan.max_depth, depth)
        return nodes, depth
    return plan.max_nodes, min(plan.max_depth, plan.max_nodes)


def _parse_size(method: str, size: str, text: str) -> dict[str, object]:
    if method == "off":
        if size:
            _refuse(f"draft plan {text!r}", "off without a size", "off")
        return {"method": "off"}
    if not size:
        _refuse(f"draft plan {text!r} without a size", _SYNTAX, f"{method}:{'1,1,3,1' if method == 'tree' else 8}")
    if method == "tree":
        vector = tuple(_integer("tree children", part) for part in size.strip("<>").split(","))
        return {"method": method, "vector": vector, "sources": ("ssm",)}
    return {"method": method, "max_depth" if method == "chain" else "max_nodes": _integer(method, size)}


def _integer(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        _refuse(f"{name} {text!r}", "a whole number", f"write {name} in digits")
    return int(text)


def _source_list(name: str, text: str) -> tuple[str, ...]:
    return tuple(text.split("+"))


def _word(name: str, text: str) -> str:
    return text


_FIELDS: Mapping[str, tuple[str, Callable[[str, str], object]]] = {
    "nodes": ("max_nodes", _integer),
    "depth": ("max_depth", _integer),
    "sources": ("sources", _source_list),
    "sampled": ("sampled", _word),
}


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        _refuse(f"{name} {value!r}", f"one of {', '.join(allowed)}", _SYNTAX)


def _range(name: str, value: int, high: int) -> None:
    if not 1 <= value <= high:
        _refuse(f"{name} {value}", f"a number from 1 to {high}", f"choose {name} inside that range")


def _check_owners(options: Mapping[str, int], sources: tuple[str, ...]) -> None:
    """Refuse an option that no source would read."""
    for name, value in options.items():
        owner = owner_of(name)
        if not owner.is_among(sources):
            _refuse(
                f"draft option {name}={value} of {owner.name}, with sources {'+'.join(sources)}",
                "options of drafters among the sources",
                f"leave {name} out, or write sources={'+'.join((*sources, owner.name))}",
            )


def _refuse(found: str, expected: str, fix: str) -> NoReturn:
    raise RequestError(found, expected, fix, param="draft")
