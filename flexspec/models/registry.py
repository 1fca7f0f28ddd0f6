"""Which file builds which family. A model file in this folder registers its families when it is imported."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from flexspec.errors import ModelConfigError
from flexspec.graph import Graph
from flexspec.models.config import ModelConfig
from flexspec.types import DType, Role

ModelBuilder = Callable[..., Graph]  # (config: ModelConfig, dtype: DType, **options of the family) -> step graph

_FAMILIES: dict[str, ModelBuilder] = {}
_NO_FAMILY = ("config", "registry")


def register_family(family: str, builder: ModelBuilder) -> None:
    """Make ``builder`` the builder of ``family``. A second registration of a name is our own bug."""
    assert family not in _FAMILIES, f"model family {family} is declared twice"
    _FAMILIES[family] = builder


def families() -> dict[str, ModelBuilder]:
    """Every family by name; imports each model file once."""
    import flexspec.models as package

    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in _NO_FAMILY:
            importlib.import_module(f"flexspec.models.{module.name}")
    return dict(sorted(_FAMILIES.items()))


def build_model(config: ModelConfig, dtype: DType, **options: Any) -> Graph:
    """The canonical graph of a model. Raises ModelConfigError for an unknown family or a bad configuration."""
    known = families()
    if config.family not in known:
        near = difflib.get_close_matches(config.family, known, n=3) or list(known)
        raise ModelConfigError(
            f"model family {config.family!r}", f"one of {', '.join(near)}",
            "use a supported model, or add one file to flexspec/models that registers the family",
        )  # fmt: skip
    return known[config.family](config, dtype, **options)


def expected_weights(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight the graph reads."""
    shapes: dict[str, tuple[int, ...]] = {}
    for value in graph.inputs_of(Role.WEIGHT):
        dims = tuple(dim for dim in value.type.dims if isinstance(dim, int))
        assert len(dims) == len(value.type.dims), f"weight {value.name} has a symbolic dim"
        shapes[value.name] = dims
    return shapes
