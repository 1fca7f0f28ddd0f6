"""What a family of generated Triton kernels is, and which families there are.

A family is one file in families/, found by its presence, that sets ``FAMILY`` to a :class:`KernelFamily`. Rendering,
compilation ahead of time, packaging, launching and the executor read that record and know no family by name. An
operator asks for a family by its name in ``KernelKey.triton``. Imports neither Triton nor torch.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import CompileError
from flexspec.graph import Attr, Graph, Node
from flexspec.kernels.gpu.targets import Target
from flexspec.ops.record import EXCHANGE, REFERENCE, record_of
from flexspec.types import DType, TensorType

if TYPE_CHECKING:
    import torch

TRITON_DTYPES = {DType.F32: "fp32", DType.F16: "fp16", DType.BF16: "bf16"}  # our name -> Triton's
Grid = tuple[int, int, int]


class Variant(Protocol):
    """One specialisation of a family's kernels: a frozen dataclass of typed parameters.

    Its constructor raises CompileError for parameters that no kernel of the family can serve.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    family: ClassVar[str]

    @property
    def name(self) -> str:
        """Unique among all families, and a legal file name."""

    @property
    def dtype(self) -> DType:
        """The element type that ``*`` stands for in the signature of an entry."""


class Config(Protocol):
    """How a variant is tiled: a frozen dataclass that survives ``config_type(**asdict(config))``."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """Unique among the configurations of a variant, and a legal part of a file name."""

    @property
    def warps(self) -> int: ...

    @property
    def stages(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel of a family's source: the ABI between launcher and binary."""

    name: str  # of the function in the source
    params: tuple[tuple[str, str], ...]  # (name, Triton's type) in call order; "*" is a pointer to the variant's dtype
    stages: int | None = None  # pipeline stages where they do not follow the configuration

    def signature(self, dtype: DType) -> list[list[str]]:
        """[name, type] of each argument in call order, for elements of ``dtype``."""
        element = f"*{TRITON_DTYPES[dtype]}"
        return [[name, element if kind == "*" else kind] for name, kind in self.params]


class Kernels(Protocol):
    """A variant that is ready to launch. Arguments are torch tensors, ints and floats in the order of the ABI."""

    variant: Any
    config: Any

    def launch(self, entry: str, grid: Grid, args: Sequence[Any]) -> None: ...


class StepArrays(Protocol):
    """The host arrays of a step that kernels may read; fields as in runtime's StepBatch."""

    @property
    def starts_R1(self) -> NDArray[np.int32]: ...

    @property
    def contexts_R(self) -> NDArray[np.int32]: ...

    @property
    def causal_R(self) -> NDArray[np.uint8]: ...

    @property
    def page_table_RB(self) -> NDArray[np.int32]: ...

    @property
    def ancestors_TW(self) -> NDArray[np.uint64]: ...

    def slots(self) -> NDArray[np.int32]: ...


@dataclass(frozen=True, slots=True)
class KernelStep:
    """What the launches of one step share."""

    arrays: StepArrays
    device: torch.device
    split_keys: int  # keys that one program of attention folds
    shared: dict[Hashable, Any] = field(default_factory=dict)  # tables that one launch computed and later ones reuse


class CheckCase(Protocol):
    """One comparison of a family's kernels with its reference."""

    @property
    def label(self) -> str:
        """Unique among the cases of the family."""

    @property
    def limit(self) -> float:
        """The largest error that passes."""

    @property
    def from_source(self) -> bool:
        """Whether a GPU checks Triton's own launch as well, which compiles once more."""

    def variant(self) -> Variant: ...

    def error(self, kernels: Kernels, device: str) -> float:
        """How far the kernels are from the reference on random inputs; infinity for NaN."""


V = TypeVar("V", bound=Variant)
C = TypeVar("C", bound=Config)
KernelsOf = Callable[[Any], Kernels]  # a variant -> its kernels, ready to launch on the executor's device
Run = Callable[
    [KernelsOf, V, Mapping[str, Attr], Sequence["torch.Tensor"], KernelStep],
    tuple["torch.Tensor", ...],
]


@dataclass(frozen=True, slots=True)
class KernelFamily(Generic[V, C]):
    """Everything the rest of the system knows about a family of generated kernels."""

    name: str  # what KernelKey.triton of the operators says
    template: str  # file in kernels/templates/triton
    config_type: type[C]
    # (node, types of the graph's values, largest token tree of a request) -> the variant that serves the node
    variant_of: Callable[[Node, Mapping[str, TensorType], int], V]
    entries: Callable[[V], tuple[Entry, ...]]
    configs: Callable[[V, Target], tuple[C, ...]]  # to try in order: the first within the target's budget is taken
    plain_config: C  # for the interpreter, and for GPUs without a known budget
    values: Callable[[V, C], dict[str, object]]  # of the template, besides ``v`` (variant) and ``c`` (configuration)
    run: Run[V]  # operands of a node -> its results; decides grids and arguments
    cases: Callable[[bool], Sequence[CheckCase]]  # the reference check; True: only what the interpreter can compute


_FAMILIES: dict[str, KernelFamily[Any, Any]] = {}


def families() -> dict[str, KernelFamily[Any, Any]]:
    """Every family, by name; imports each file of families/ once."""
    import flexspec.kernels.gpu.families as package

    for module in pkgutil.iter_modules(package.__path__):
        family = importlib.import_module(f"flexspec.kernels.gpu.families.{module.name}").FAMILY
        assert _FAMILIES.setdefault(family.name, family) is family, f"kernel family {family.name} is declared twice"
    return dict(sorted(_FAMILIES.items()))


def family_of(name: str) -> KernelFamily[Any, Any]:
    """The family of that name. Raises CompileError naming the nearest."""
    known = _FAMILIES if name in _FAMILIES else families()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or list(known)
        raise CompileError(
            f"kernel family {name!r}",
            f"one of {', '.join(near)}",
            "name a known family in KernelKey.triton, or add one file to kernels/gpu/families",
        )
    return known[name]


def kernel_variants(graph: Graph, max_tree_tokens: int) -> dict[int, Variant]:
    """The variant of each node (by its index) that runs on a generated kernel.

    ``max_tree_tokens`` is the most rows a request that is not causal can have in a step. Compiler and executor both
    ask here: what an artifact holds is what its executor looks for. Raises CompileError for an operator whose record
    names an unknown family, and for a node that its family cannot serve.
    """
    types = graph.types()
    variants: dict[int, Variant] = {}
    for index, node in enumerate(graph.nodes):
        key = record_of(node).kernel.triton
        if key not in (REFERENCE, EXCHANGE):
            variants[index] = family_of(key).variant_of(node, types, max_tree_tokens)
    return variants
