"""Rotary position embedding in half-split pairs (as in Hugging Face), with linear, llama3 and yarn scaling.

Also owns the cos/sin tables (numpy only) that every backend uses, so that all agree to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flexspec.graph import Attr
from flexspec.ops.checks import activation, require
from flexspec.ops.elementwise import flops_per_element
from flexspec.ops.record import Attrs, KernelKey, OpRecord, TpLayout, register
from flexspec.types import DType, TensorType

if TYPE_CHECKING:
    import torch

_FIELDS = {  # which fields a kind reads; the others are reset so that equal rotations have equal attributes
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"),
    "yarn": ("factor", "original_max_positions", "beta_fast", "beta_slow", "attention_factor"),
}
KINDS = tuple(_FIELDS)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding (half-split pairs, as in Hugging Face)."""

    theta: float = 10_000.0
    kind: str = "default"  # one of KINDS
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0  # 0 = derive from factor (yarn)


def rope_attrs(rope: RopeConfig, max_positions: int) -> dict[str, Attr]:
    """The operator's attributes for these settings; those that the kind does not read have their defaults."""
    attrs: dict[str, Attr] = asdict(RopeConfig(theta=rope.theta, kind=rope.kind))
    attrs |= {field: getattr(rope, field) for field in _FIELDS.get(rope.kind, ())}
    for field, default in asdict(RopeConfig()).items():
        value = attrs[field]
        attrs[field] = float(value) if isinstance(default, float) and isinstance(value, int) else value
    return attrs | {"max_positions": max_positions}


def _number(attrs: Mapping[str, Attr], key: str) -> float:
    value = attrs[key]
    assert isinstance(value, int | float)
    return value


def _llama3(inverse: NDArray[np.float32], attrs: Attrs) -> NDArray[np.float32]:
    """Long wavelengths divided by factor, short ones unchanged, those between blended (Llama 3.1)."""
    original, factor = _number(attrs, "original_max_positions"), _number(attrs, "factor")
    low, high = _number(attrs, "low_freq_factor"), _number(attrs, "high_freq_factor")
    wavelength = 2 * math.pi / inverse
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    return np.asarray(blended, np.float32)


def _yarn(inverse: NDArray[np.float32], attrs: Attrs, head_dim: int) -> NDArray[np.float32]:
    """Unchanged and divided frequencies, blended by rotations over the original context (arXiv 2309.00071)."""
    original, factor, theta = (_number(attrs, key) for key in ("original_max_positions", "factor", "theta"))

    def pair_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(_number(attrs, "beta_fast"))), 0)
    high = min(math.ceil(pair_of(_number(attrs, "beta_slow"))), head_dim - 1)
    width = max(high - low, 0.001)
    divided = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / width, 0.0, 1.0)
    return np.asarray(inverse / factor * divided + inverse * (1 - divided), np.float32)


def inverse_frequencies(attrs: Attrs, head_dim: int) -> tuple[NDArray[np.float32], float]:
    """Angle per position of each pair, float32 [D/2], and the factor that multiplies cos and sin."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (1.0 / np.power(np.float32(_number(attrs, "theta")), exponent)).astype(np.float32)
    kind, factor = attrs["kind"], _number(attrs, "factor")
    if kind == "linear":
        return (inverse / np.float32(factor)).astype(np.float32), 1.0
    if kind == "llama3":
        return _llama3(inverse, attrs), 1.0
    if kind == "yarn":
        derived = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
        return _yarn(inverse, attrs, head_dim), _number(attrs, "attention_factor") or derived
    return inverse, 1.0


def rope_tables(attrs: Attrs, head_dim: int, max_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(cos, sin), float32 [max_positions, D/2], with the scaling and the attention factor applied."""
    inverse, scale = inverse_frequencies(attrs, head_dim)
    angles = np.arange(max_positions, dtype=np.float32)[:, None] * inverse[None]
    return np.cos(angles) * np.float32(scale), np.sin(angles) * np.float32(scale)


def _shape(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    x, positions = types
    head_dim = x.dims[-1] if len(x.dims) == 3 else None
    require(
        x.dtype.is_float and isinstance(head_dim, int) and head_dim % 2 == 0,
        "rope", types, "a floating-point x of rank 3 [T,H,D] with an even D",
    )  # fmt: skip
    require(
        positions.dtype is DType.I32 and positions.dims == x.dims[:1], "rope", types, f"i32 positions [{x.dims[0]}]"
    )
    require(attrs["kind"] in KINDS, "rope", types, f"kind one of {', '.join(KINDS)} (found {attrs['kind']!r})")
    scaled = attrs["kind"] in ("llama3", "yarn")
    require(
        _number(attrs, "theta") > 1.0 and _number(attrs, "factor") > 0.0 and _number(attrs, "max_positions") > 0,
        "rope", types, "theta above 1, factor and max_positions above 0",
    )  # fmt: skip
    require(
        not scaled or _number(attrs, "original_max_positions") > 0,
        "rope", types, f"original_max_positions above 0 for kind {attrs['kind']}",
    )  # fmt: skip
    return (activation(x, x.dims),)


def _bytes(ins: Sequence[TensorType], outs: Sequence[TensorType], _attrs: Attrs, sizes: dict[str, int]) -> int:
    """x in and out, positions, and one row of both tables (float32, D/2 each) per token."""
    rows = ins[1].elements(sizes)
    head_dim = ins[0].dims[2]
    assert isinstance(head_dim, int)
    return ins[0].bytes(sizes) + outs[0].bytes(sizes) + ins[1].bytes(sizes) + rows * head_dim * 4


def _reference(inputs: Sequence[torch.Tensor], attrs: Attrs) -> tuple[torch.Tensor, ...]:
    import torch

    x, positions = inputs
    inverse, scale = inverse_frequencies(attrs, x.shape[-1])
    angles = positions.float()[:, None] * torch.from_numpy(inverse).to(x.device)[None]
    cos, sin = ((f(angles) * scale).to(x.dtype)[:, None, :] for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, -1)
    return (torch.cat([a * cos - b * sin, b * cos + a * sin], -1),)


ROPE = register(
    OpRecord(
        name="rope",
        doc="Rotate pairs (x[d], x[d + D/2]) of x [T,H,D] by the angles of positions [T].",
        arity=(2, 2),
        shape=_shape,
        flops=flops_per_element(3),
        bytes=_bytes,
        layouts=(TpLayout("replicated", (None, None), (None,)), TpLayout("heads", (1, None), (1,))),
        reference=_reference,
        kernel=KernelKey(cpu="rope"),
        bounds=lambda types, attrs: {1: int(_number(attrs, "max_positions"))},
        attrs={
            "theta": float,
            "kind": str,
            "factor": float,
            "low_freq_factor": float,
            "high_freq_factor": float,
            "original_max_positions": int,
            "beta_fast": float,
            "beta_slow": float,
            "attention_factor": float,
            "max_positions": int,
        },
    )
)
