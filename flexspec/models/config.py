"""The resolved configuration of a decoder model: what loaders produce and model files build a graph from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding (half-split pairs, as in Hugging Face). ``kind``: default, linear, llama3, yarn."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0  # 0 = derive from factor (yarn)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder model. ``family`` selects the file in flexspec/models through registry.py."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What transformers' configuration class of one architecture assumes where config.json is silent.

    A family lists the architectures whose checkpoints it builds; the loader asks the registry, so that a new family
    stays one file. ``activations`` are the hidden_act names its graph computes.
    """

    positions: int = 2048
    activations: tuple[str, ...] = ("silu", "swish")
    kv_heads: int | None = None  # None: as many as heads
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    window: int | None = None
    window_is_optional: bool = False  # only with use_sliding_window


class WeightSource(Protocol):
    """Read access to a checkpoint under canonical names.

    Canonical names are Hugging Face Llama names without the leading ``model.``: ``embed_tokens.weight``,
    ``layers.0.self_attn.q_proj.weight``, ``layers.0.mlp.gate_proj.weight``, ``norm.weight``, ``lm_head.weight`` (absent
    when tied). Linear weights are [out, in]; RoPE pairs are half-split (GGUF's permuted q/k are put back).
    """

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def get(self, name: str) -> NDArray[np.float32]:
        """The whole tensor in float32, row major. Raises WeightError or ModelFileError naming file and tensor."""
        ...
