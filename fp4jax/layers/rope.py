"""Rotary position embedding (arXiv 2104.09864) and the published ways of stretching it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from fp4jax.errors import ConfigError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Static description of the rotary frequencies.

    Attributes:
      theta: base of the geometric progression.
      kind: one of :data:`ROPE_TYPES`.
      factor: stretch; the others are the fields of the same names in Hugging Face configs.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """From ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling`` (4).

        Raises:
          ConfigError: an unknown rope type, or a field that it needs is missing or no number.
        """
        spec: dict[str, Any] = {}
        for name in ("rope_scaling", "rope_parameters"):
            stated = config.get(name) or {}
            if not isinstance(stated, Mapping):
                raise ConfigError(f"config.json: {name} must be an object, found {stated!r:.80}")
            spec.update(stated)
        nested = [name for name, value in spec.items() if isinstance(value, Mapping)]
        if nested:
            raise ConfigError(
                f"config.json: rope parameters for each kind of layer ({', '.join(nested)}) are "
                "not supported"
            )
        kind = spec.get("rope_type", spec.get("type", "default"))
        if kind not in ROPE_TYPES:
            known = ", ".join(ROPE_TYPES)
            raise ConfigError(f"config.json: rope_type {kind!r} is not supported; known: {known}")
        spec = {"rope_theta": config.get("rope_theta"), **spec}
        theta = _positive(spec, "rope_theta", kind, 10000.0)
        if kind == "default":
            return cls(theta=theta)
        longest = _positive(config, "max_position_embeddings", kind, 8192)
        if kind == "llama3":
            original = _positive(spec, "original_max_position_embeddings", kind)
        else:
            original = _positive(spec, "original_max_position_embeddings", kind, longest)
        # transformers 5 lets YaRN leave the factor to the two lengths.
        factor = _positive(spec, "factor", kind, longest / original if kind == "yarn" else None)
        rope = cls(theta=theta, kind=kind, factor=factor, original_max_position=int(original))
        if kind == "llama3":
            low = _positive(spec, "low_freq_factor", kind)
            high = _positive(spec, "high_freq_factor", kind)
            if high <= low:
                raise ConfigError(
                    f"config.json: rope_type 'llama3' needs high_freq_factor = {high} above "
                    f"low_freq_factor = {low}"
                )
            return dataclasses.replace(rope, low_freq_factor=low, high_freq_factor=high)
        if kind == "yarn":
            return dataclasses.replace(
                rope,
                beta_fast=_positive(spec, "beta_fast", kind, 32.0),
                beta_slow=_positive(spec, "beta_slow", kind, 1.0),
                truncate=spec.get("truncate") is not False,
                attention_factor=_yarn_attention_factor(spec, factor),
            )
        return rope


def _positive(spec: Mapping[str, Any], name: str, kind: str, default: float | None = None) -> float:
    value = spec.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"config.json: rope_type {kind!r} needs {name!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"config.json: {name!r} must be a positive number, found {value!r:.80}")
    return float(value)


def _yarn_attention_factor(spec: Mapping[str, Any], factor: float) -> float:
    """The stated one, else what arXiv 2309.00071 recommends, scaled as DeepSeek-V2 does."""

    def recommended(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if spec.get("attention_factor") is not None:
        return _positive(spec, "attention_factor", "yarn")
    if spec.get("mscale") and spec.get("mscale_all_dim"):
        scale = _positive(spec, "mscale", "yarn")
        return recommended(scale) / recommended(_positive(spec, "mscale_all_dim", "yarn"))
    return recommended(1.0)


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> Float32[Array, " half"]:
    """Radians a position for each pair of channels, stretched as ``rope.kind`` says."""
    half = rotary_dim // 2
    exponent = jnp.arange(half, dtype=jnp.float32) / jnp.float32(half)
    freq = 1.0 / jnp.float32(rope.theta) ** exponent
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "llama3":
        # Long waves are stretched, short ones kept, those between blended.
        turns = rope.original_max_position * freq / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = jnp.clip(blend, 0.0, 1.0)
        return (1 - blend) * freq / rope.factor + blend * freq
    if rope.kind == "yarn":
        # arXiv 2309.00071, equation 23, with the reference code's rounding of the bounds.
        def channel(turns: float) -> float:
            span = math.log(rope.original_max_position / (turns * 2 * math.pi))
            return rotary_dim * span / (2 * math.log(rope.theta))

        low, high = channel(rope.beta_fast), channel(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        ramp = (jnp.arange(half, dtype=jnp.float32) - low) / (high - low or 0.001)
        keep = 1 - jnp.clip(ramp, 0.0, 1.0)
        return (1 - keep) * freq / rope.factor + keep * freq
    return freq


def apply_rope(
    x: Float[Array, "batch time heads dim"],
    positions: Int[Array, "batch time"],
    rope: RopeConfig,
    rotary_dim: int | None = None,
) -> Float[Array, "batch time heads dim"]:
    """Rotates the first ``rotary_dim`` channels (default all), pairing channel i with i + half."""
    rotary_dim = rotary_dim or x.shape[-1]
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(rope, rotary_dim)
    cos = jnp.cos(angles)[:, :, None, :] * rope.attention_factor
    sin = jnp.sin(angles)[:, :, None, :] * rope.attention_factor
    first, second, rest = jnp.split(x.astype(jnp.float32), (rotary_dim // 2, rotary_dim), axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
