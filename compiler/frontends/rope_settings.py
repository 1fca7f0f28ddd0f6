"""Rotary-embedding settings of checkpoints: old and new Hugging Face keys, GGUF metadata, Llama 3 factor tensors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.frontends.settings import Settings
from flexspec.errors import ModelConfigError
from flexspec.ops.rope import RopeConfig

_KINDS = ("default", "linear", "llama3", "yarn")
_FACTOR_TOLERANCE = 1e-4


def rope_from_huggingface(config: Settings, max_positions: int, path: Path, theta: float = 10_000.0) -> RopeConfig:
    """The settings of a config.json: ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling``.

    ``theta`` is the architecture's default.

    Raises ModelConfigError for kinds other than default, linear, llama3 and yarn, and for partial rotation.
    """
    table = config.raw("rope_parameters") or config.raw("rope_scaling") or {}
    if isinstance(table, dict) and isinstance(table.get("full_attention"), dict):
        table = table["full_attention"]  # transformers 5 writes one table per layer type
    if not isinstance(table, dict):
        raise config.error("rope_parameters" if "rope_parameters" in config else "rope_scaling", "a table of settings")
    rope = Settings(table, path)
    if rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise rope.error("partial_rotary_factor", "rotation of the whole head", "use a model with full rotation")
    theta = rope.number("rope_theta", config.number("rope_theta", theta))
    kind = rope.string("rope_type", rope.string("type", "default"))
    if kind not in _KINDS:
        found = f"{path} scales its rotary embedding by {kind!r}"
        raise ModelConfigError(found, f"one of {', '.join(_KINDS)}", "use a model with one of these")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=rope.number("factor"))
    original_key = "original_max_position_embeddings"
    original = config.integer(original_key, rope.integer(original_key, max_positions))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", f"more than low_freq_factor ({low})")
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=rope.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=original,
        )
    if not rope.flag("truncate", True):
        raise rope.error("truncate", "true", "use a model whose YaRN ramp is truncated")
    factor = rope.number("factor", max_positions / original)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_positions=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: Settings, factor: float) -> float:
    """0 means the paper's default; DeepSeek's files have ``mscale`` and ``mscale_all_dim`` instead."""
    if "attention_factor" in rope:
        return rope.number("attention_factor")
    if rope.raw("mscale") and rope.raw("mscale_all_dim"):
        scale = _mscale(factor, rope.number("mscale")), _mscale(factor, rope.number("mscale_all_dim"))
        return scale[0] / scale[1]
    return 0.0


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_from_gguf(
    metadata: Settings, arch: str, head_dim: int, factors: NDArray[np.float32] | None, path: Path
) -> RopeConfig:
    """The settings of GGUF metadata; ``factors`` is the file's ``rope_freqs.weight`` [D/2], if it has one.

    Raises ModelConfigError for other kinds of scaling and for factors that are not Llama 3's formula.
    """
    theta = metadata.number(f"{arch}.rope.freq_base", 10_000.0)
    dims = metadata.integer(f"{arch}.rope.dimension_count", head_dim)
    if dims != head_dim:
        raise metadata.error(f"{arch}.rope.dimension_count", f"the whole head dim ({head_dim})")
    scaling = f"{arch}.rope.scaling"
    kind = metadata.string(f"{scaling}.type", "linear" if f"{arch}.rope.scale_linear" in metadata else "none")
    if factors is not None:
        if kind != "none":
            raise metadata.error(f"{scaling}.type", "no second scaling besides the tensor rope_freqs.weight")
        return rope_from_factors(factors, theta, head_dim, path)
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        factor = metadata.number(f"{scaling}.factor", metadata.number(f"{arch}.rope.scale_linear", 1.0))
        return RopeConfig(theta=theta, kind="linear", factor=factor) if factor != 1.0 else RopeConfig(theta=theta)
    if kind != "yarn":
        raise metadata.error(f"{scaling}.type", "none, linear or yarn")
    for key in ("yarn_ext_factor", "yarn_log_multiplier"):
        if metadata.number(f"{scaling}.{key}", 1.0, positive=False) != 1.0:
            raise metadata.error(f"{scaling}.{key}", "1, or no such key")
    factor = metadata.number(f"{scaling}.factor")
    # llama.cpp multiplies the paper's attention factor by this one
    attention = metadata.number(f"{scaling}.yarn_attn_factor", metadata.number(f"{scaling}.attn_factor", 1.0))
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=metadata.integer(f"{scaling}.original_context_length"),
        beta_fast=metadata.number(f"{scaling}.yarn_beta_fast", 32.0),
        beta_slow=metadata.number(f"{scaling}.yarn_beta_slow", 1.0),
        attention_factor=0.0 if attention == 1.0 else attention * _mscale(factor, 1.0),
    )


def rope_from_factors(factors: NDArray[np.float32], theta: float, head_dim: int, path: Path) -> RopeConfig:
    """Recognise Llama 3's scaling in the per-pair frequency divisors that llama.cpp's converter writes.

    Between its two wavelengths Llama 3's smoothing is linear in 1/wavelength, so slope and intercept over the pairs
    that are neither 1 nor the full factor give both bounds; the result must reproduce all factors.
    Raises ModelConfigError if it does not.
    """
    if factors.shape == (head_dim // 2,) and np.isfinite(factors).all() and (factors >= 1).all():
        if (factors == 1).all():
            return RopeConfig(theta=theta)
        rope = _fit_llama3(factors.astype(np.float64), theta, head_dim)
        if rope is not None and np.allclose(llama3_factors(rope, head_dim), factors, rtol=_FACTOR_TOLERANCE, atol=0):
            return rope
    found = f"{path} has rotary factors (rope_freqs.weight) that follow an unknown rule"
    fix = "convert the model again from its Hugging Face folder, or load that folder"
    raise ModelConfigError(found, f"{head_dim // 2} factors by the Llama 3 rule", fix)


def _fit_llama3(factors: NDArray[np.float64], theta: float, head_dim: int) -> RopeConfig | None:
    factor = float(factors.max())
    inverse_wavelengths = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    between = (factors > 1 + _FACTOR_TOLERANCE) & (factors < factor * (1 - _FACTOR_TOLERANCE))
    if between.sum() < 2:
        return None
    smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
    slope, intercept = np.polyfit(inverse_wavelengths[between], smooth, 1)
    if slope <= 0 or intercept >= 0:
        return None
    # smooth = (original / wavelength - low) / (high - low); only original/low and original/high matter, so low = 1
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=round(float(1 - 1 / intercept), 2),
        original_max_positions=round(float(-slope / intercept)),
    )


def llama3_factors(rope: RopeConfig, head_dim: int) -> NDArray[np.float64]:
    """Frequency divisors [D/2] of Llama 3's rule (the inverse of what ``rope_from_factors`` recognises)."""
    wavelengths = 2 * math.pi * rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    spread = rope.high_freq_factor - rope.low_freq_factor
    smooth = np.clip((rope.original_max_positions / wavelengths - rope.low_freq_factor) / spread, 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / rope.factor + smooth))
