"""What one rank of a model runs and stores at every tensor-parallel degree: the basis of all prices.

No formula here is specific to an architecture. The model file's graph, with two blocks, is cut for a degree by the
partition pass and lowered as for serving; the rank with the largest share represents the degree. Its nodes before block
0, in block 0 and after block 1 are priced by their operator records: a model is a front, equal blocks, and a back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from flexspec.arithmetic import ceil_div
from flexspec.compiler.artifact.plan import Stage
from flexspec.compiler.partition.lower_ranks import lower_ranks
from flexspec.compiler.passes.pipeline import LLM_PASSES, SSM_PASSES, Pass
from flexspec.errors import PartitionError, PlanError
from flexspec.graph import Graph, Node, as_int
from flexspec.models.config import ModelConfig
from flexspec.ops.record import Attrs, Collective, OpRecord, record_of
from flexspec.retype import store_weights
from flexspec.types import PAGE_TOKENS, DType, Role, TensorType, WeightFormat

Sizes = dict[str, int]
UNITS = ("front", "block", "back")  # before the blocks, one block, after the blocks


@dataclass(frozen=True, slots=True)
class Call:
    """One operator on a rank's operands."""

    record: OpRecord
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    attrs: Attrs
    joins_logits: bool = False  # it gathers the ranks' shares of the logits

    def flops(self, sizes: Sizes) -> int:
        return self.record.flops(self.inputs, self.outputs, self.attrs, sizes)

    def bytes(self, sizes: Sizes) -> int:
        return self.record.bytes(self.inputs, self.outputs, self.attrs, sizes)


@dataclass(frozen=True, slots=True, eq=False)
class RankProfile:
    """The rank with the largest share at a degree."""

    degree: int
    calls: Mapping[str, tuple[Call, ...]]  # by unit
    weight_bytes: Mapping[str, int]  # by unit
    shared_bytes: int  # weights that front and back both read (tied embeddings)
    kv_bytes_per_token: int  # of one block
    graph: Graph

    def peak_bytes(self, sizes: Sizes, *, back: bool) -> int:
        """Peak bytes of live activations, in two blocks (and after them, with ``back``)."""
        return _rank_peak_bytes(self, tuple(sizes.items()), back)


@lru_cache(maxsize=1 << 12)
def _rank_peak_bytes(rank: RankProfile, sizes: tuple[tuple[str, int], ...], back: bool) -> int:
    nodes = rank.graph.nodes
    return peak_bytes(nodes if back else nodes[: len(nodes) - len(rank.calls["back"])], dict(sizes))


def peak_bytes(nodes: Sequence[Node], sizes: Sizes) -> int:
    """Peak bytes of live activations when nodes run in order."""
    last = {name: i for i, node in enumerate(nodes) for name in node.inputs}
    alive: dict[str, int] = {}
    peak = 0
    for i, node in enumerate(nodes):
        for value in node.outputs:
            if value.type.role is Role.ACTIVATION:
                alive[value.name] = value.type.bytes(sizes)
        peak = max(peak, sum(alive.values()))
        for name in [name for name in alive if last.get(name, -1) <= i]:
            del alive[name]
    return peak


@dataclass(frozen=True, slots=True, eq=False)
class ModelProfile:
    """A model: its blocks, and its largest rank at every degree."""

    name: str
    config: ModelConfig
    dtype: DType  # of activations and KV caches
    ranks: Mapping[int, RankProfile]
    refused: Mapping[int, str]  # by degree, why the model cannot be cut to it
    note: str = ""  # for the page of a plan
    taps: tuple[int, ...] = ()  # of an SSM: layers of the LLM whose states it reads
    weights: WeightFormat | None = None  # how its matrices are stored; None: in dtype

    @property
    def precision(self) -> str:
        """The dtype it computes in and, if different, how its weights are stored."""
        return f"{self.dtype.value}, weights {self.weights.name}" if self.weights else self.dtype.value

    @property
    def blocks(self) -> int:
        return self.config.layers

    @property
    def hidden_bytes(self) -> int:
        """One row of the hidden states that pass from stage to stage."""
        return self.config.hidden_size * self.dtype.size_bytes

    @property
    def reads_features(self) -> int:
        """Columns of the LLM's states that an SSM reads; 0 if it reads none, and for an LLM."""
        inputs = self.ranks[1].graph.inputs
        return next((as_int(value.type.dims[-1]) for value in inputs if value.type.role is Role.ACTIVATION), 0)

    def weight_bytes(self) -> int:
        """The whole model."""
        rank = self.ranks[1]
        units = rank.weight_bytes
        return units["front"] + units["back"] + self.blocks * units["block"] - rank.shared_bytes


BuildGraph = Callable[[ModelConfig, DType], Graph]


def profile_model(
    name: str,
    config: ModelConfig,
    dtype: DType,
    build: BuildGraph,
    *,
    degrees: Sequence[int] = (1,),
    ssm: bool = False,
    note: str = "",
    weights: WeightFormat | None = None,
) -> ModelProfile:
    """Cut and lower the model for every degree; degrees that the partition pass refuses are recorded with its reason.

    ``weights``: how matrices are stored; None: in ``dtype``. Raises PlanError for a model whose blocks differ,
    PartitionError for one without blocks, GraphError for matrices that the format cannot store.
    """
    if config.dense_layers:
        raise PlanError(
            f"{name}, where experts alternate with dense layers ({', '.join(map(str, config.dense_layers[:6]))} ...)",
            "equal decoder blocks",
            "write a plan for this model by hand",
        )
    graph = build(replace(config, layers=2), dtype)
    graph = graph if weights is None else store_weights(graph, weights)
    passes = SSM_PASSES if ssm else LLM_PASSES
    ranks: dict[int, RankProfile] = {}
    refused: dict[int, str] = {}
    for degree in dict.fromkeys((1, *degrees)):
        try:
            ranks[degree] = _rank_profile(graph, degree, passes)
        except PartitionError as error:
            if degree == 1:
                raise
            refused[degree] = f"{error.found}: needs {error.expected}"
    return ModelProfile(name, config, dtype, ranks, refused, note, weights=weights)


def step_sizes(rows: int, requests: int, context_tokens: int, page_tokens: int = PAGE_TOKENS) -> Sizes:
    """Dim sizes of a step of ``rows`` rows over all requests, every row with logits (tree verification)."""
    request_rows = ceil_div(rows, requests)
    pages, words = ceil_div(context_tokens + request_rows, page_tokens), ceil_div(request_rows, 64)
    return {
        "T": rows, "L": rows, "R": requests, "R1": requests + 1, "S": context_tokens, "B": pages,
        "P": pages * requests, "W": words,
    }  # fmt: skip


def _rank_profile(graph: Graph, degree: int, passes: Sequence[Pass]) -> RankProfile:
    parts = lower_ranks(graph, (Stage(0, 2, tuple(range(degree))),), passes)
    largest = max((part.graph for part in parts), key=_weight_and_kv)
    starts = [_first_of_block(largest, i) for i in range(2)]
    length = starts[1] - starts[0]
    nodes = largest.nodes
    split = {
        "front": nodes[: starts[0]],
        "block": nodes[starts[0] : starts[1]],
        "back": nodes[starts[1] + length :],
    }
    second_block = nodes[starts[1] : starts[1] + length]
    if [node.op for node in second_block] != [node.op for node in split["block"]]:
        raise PlanError(
            f"blocks of {graph.name} that differ", "equal decoder blocks", "this model cannot be priced block by block"
        )
    types = largest.types()
    reads = {unit: _weights(part, types) for unit, part in split.items()}
    shared = reads["front"] & reads["back"]
    size = partial(_bytes_of, types=types)
    kv = [types[name] for node in split["block"] for name in node.inputs if types[name].role is Role.KV]
    return RankProfile(
        degree,
        {unit: tuple(_call(node, types, unit) for node in part) for unit, part in split.items()},
        {unit: size(names) for unit, names in reads.items()},
        size(shared),
        sum(kind.dtype.size_bytes * as_int(kind.dims[2]) * as_int(kind.dims[3]) for kind in kv),
        largest,
    )


def _weight_and_kv(graph: Graph) -> int:
    """Bytes for comparing ranks: weights, and one page of cache."""
    return sum(v.type.bytes({"P": 1}) for v in graph.inputs if v.type.role in (Role.WEIGHT, Role.KV))


def _first_of_block(graph: Graph, block: int) -> int:
    return next(i for i, node in enumerate(graph.nodes) if node.block == block)


def _weights(nodes: Sequence[Node], types: Mapping[str, TensorType]) -> set[str]:
    return {name for node in nodes for name in node.inputs if types[name].role is Role.WEIGHT}


def _bytes_of(names: set[str], types: Mapping[str, TensorType]) -> int:
    return sum(types[name].bytes({}) for name in names)


def _call(node: Node, types: Mapping[str, TensorType], unit: str) -> Call:
    inputs = tuple(types[name] for name in node.inputs)
    record = record_of(node)
    joins = unit == "back" and record.collective is Collective.ALL_GATHER
    return Call(record, inputs, tuple(value.type for value in node.outputs), dict(node.attrs), joins)
