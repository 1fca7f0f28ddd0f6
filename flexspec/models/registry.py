"""Which file builds which family. A model file in this folder registers its families on import."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from flexspec.errors import ModelConfigError
from flexspec.graph import Graph
from flexspec.models.config import Checkpoint, ModelConfig
from flexspec.types import DType, Role

ModelBuilder = Callable[..., Graph]  # (config: ModelConfig, dtype: DType, **options of the family) -> step graph

_FAMILIES: dict[str, ModelBuilder] = {}
_ARCHITECTURES: dict[str, tuple[str, Checkpoint]] = {}
_NO_FAMILY = ("config", "registry")


def register_family(family: str, builder: ModelBuilder, architectures: Mapping[str, Checkpoint] | None = None) -> None:
    """Make ``builder`` the builder of ``family``, and of Hugging Face checkpoints of ``architectures``.

    A builder takes ``(config, dtype, *, name=...)``; one that also takes ``taps=(layers...)`` and outputs those hidden
    states (like llama.py) can be served with a hidden-state SSM. Registering a name twice is a bug of ours.
    """
    assert family not in _FAMILIES, f"model family {family} is declared twice"
    _FAMILIES[family] = builder
    for name, rules in (architectures or {}).items():
        assert name not in _ARCHITECTURES, f"architecture {name} is declared twice"
        _ARCHITECTURES[name] = (family, rules)


def architectures() -> dict[str, tuple[str, Checkpoint]]:
    """Family and rules of every Hugging Face architecture that some family builds."""
    families()
    return dict(_ARCHITECTURES)


def families() -> dict[str, ModelBuilder]:
    """Every family by name; imports each model file once."""
    import flexspec.models as package

    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in _NO_FAMILY:
            importlib.import_module(f"flexspec.models.{module.name}")
    return dict(sorted(_FAMILIES.items()))


def build_model(config: ModelConfig, dtype: DType, **options: Any) -> Graph:
    """The canonical graph of a model.

    Raises ModelConfigError for an unknown family, a bad configuration, or an option that the family's builder lacks.
    """
    known = families()
    if config.family not in known:
        near = difflib.get_close_matches(config.family, known, n=3) or list(known)
        raise ModelConfigError(
            f"model family {config.family!r}", f"one of {', '.join(near)}",
            "use a supported model, or add one file to flexspec/models that registers the family",
        )  # fmt: skip
    builder = known[config.family]
    offered = inspect.signature(builder).parameters
    refused = [name for name in options if name not in offered]
    if refused:
        raise ModelConfigError(
            f"family {config.family} offers no {', '.join(refused)}",
            f"a family that does ({config.family} offers {', '.join(list(offered)[2:]) or 'no options'})",
            "leave out the SSM that reads hidden states, or let the family's builder take taps",
        )
    return builder(config, dtype, **options)


def expected_weights(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that the graph reads."""
    shapes: dict[str, tuple[int, ...]] = {}
    for value in graph.inputs_of(Role.WEIGHT):
        dims = tuple(dim for dim in value.type.dims if isinstance(dim, int))
        assert len(dims) == len(value.type.dims), f"weight {value.name} has a symbolic dim"
        shapes[value.name] = dims
    return shapes
