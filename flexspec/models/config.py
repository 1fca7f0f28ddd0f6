"""The resolved configuration of a decoder model: what loaders produce and model files build a graph from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from flexspec.errors import ModelConfigError
from flexspec.ops.rope import KINDS, RopeConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_POSITIONS = 1 << 26


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder model. Fields from ``experts`` on are for mixtures of experts."""

    family: str  # selects the file in flexspec/models, through registry.py
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int  # in a mixture of experts, that of ``dense_layers``
    norm_eps: float
    max_positions: int
    rope: RopeConfig = RopeConfig()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    normalize_routing: bool = False  # the chosen experts' weights sum to 1
    dense_layers: tuple[int, ...] = ()  # layers with one MLP instead of experts


class ConfigKeys(Protocol):
    """The keys of a config.json; a wrong value raises ModelConfigError naming file and key."""

    def __contains__(self, key: str) -> bool: ...

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int: ...

    def flag(self, key: str, default: bool) -> bool: ...

    def integers(self, key: str) -> tuple[int, ...]: ...

    def raw(self, key: str) -> Any: ...

    def error(self, key: str, expected: str, fix: str = ...) -> Exception: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Rules for the checkpoints of one architecture, above all the defaults of transformers' configuration class.

    A family lists the architectures whose checkpoints it builds; the loader asks the registry, so that a new family
    stays one file.
    """

    positions: int = 2048
    activations: tuple[str, ...] = ("silu", "swish")  # the hidden_act names that its graph computes
    kv_heads: int | None = None  # None: as many as heads
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    window: int | None = None
    window_is_optional: bool = False  # only with use_sliding_window
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    # Llama's name of a key -> its name in config.json, where they differ ({"intermediate_size": "ffn_dim"}).
    keys: Mapping[str, str] = field(default_factory=dict)
    # Adds what only this family has to the configuration, and refuses what its graph does not compute.
    read: Callable[[ConfigKeys, ModelConfig], ModelConfig] | None = None
    # (stored name, our name) of weights stored under other names, in a layer without its ``layers.N.``; ``{x}`` is the
    # number of an expert, whose weights are stacked.
    stored_names: tuple[tuple[str, str], ...] = ()


class WeightSource(Protocol):
    """Read access to a checkpoint under canonical names.

    Canonical names are Hugging Face Llama names without the leading ``model.``: ``embed_tokens.weight``,
    ``layers.0.self_attn.q_proj.weight``, ``layers.0.mlp.gate_proj.weight``, ``norm.weight``, ``lm_head.weight`` (absent
    when tied). Linear weights are [out, in]; RoPE pairs are half-split (GGUF's permutation of q/k is undone).
    """

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def get(self, name: str) -> NDArray[np.float32]:
        """The tensor in float32, row major. Raises WeightError or ModelFileError naming file and tensor."""
        ...


def check_config(config: ModelConfig, source: str = "the configuration") -> None:
    """Raise ModelConfigError for contradictory or impossible numbers. ``source``: the loader's file, for the error."""
    _check_sizes(config, source)
    ids = [*config.eos_ids, *([] if config.bos_id is None else [config.bos_id])]
    outside = sorted(token for token in ids if token >= config.vocab_size)
    if outside:
        raise bad_config(
            f"{source} names the special tokens {outside} in a vocabulary of {config.vocab_size}",
            "ids below vocab_size",
        )
    if config.rope.kind not in KINDS:
        raise bad_config(f"{source} has rope kind {config.rope.kind!r}", f"one of {', '.join(KINDS)}")
    if config.rope.kind in ("llama3", "yarn") and config.rope.original_max_positions <= 0:
        raise bad_config(
            f"{source} has rope kind {config.rope.kind} without original_max_positions", "the original context length"
        )
    if config.rope.theta <= 1.0 or config.rope.factor <= 0.0:
        raise bad_config(
            f"{source} has rope theta={config.rope.theta}, factor={config.rope.factor}",
            "theta above 1 and factor above 0",
        )


def _check_sizes(config: ModelConfig, source: str) -> None:
    sizes = ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "ffn_size", "max_positions")
    for name in sizes:
        if getattr(config, name) <= 0:
            raise bad_config(f"{source} has {name}={getattr(config, name)}", "a size above 0")
    if config.heads % config.kv_heads:
        raise bad_config(
            f"{source} has {config.heads} query heads over {config.kv_heads} key/value heads",
            "a whole number of query heads per key/value head",
        )
    if config.max_positions > _MAX_POSITIONS:
        raise bad_config(f"{source} has a context of {config.max_positions} tokens", f"at most {_MAX_POSITIONS}")
    if config.norm_eps <= 0.0:
        raise bad_config(f"{source} has norm_eps={config.norm_eps}", "a norm_eps above 0")


def bad_config(found: str, expected: str) -> ModelConfigError:
    """The error for a configuration from which no graph can be built."""
    return ModelConfigError(found, expected, "correct the model's configuration file, or download it again")
