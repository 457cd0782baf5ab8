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

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """From ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling`` (4).

        Raises:
          ConfigError: an unknown rope type, or a field that it needs is missing.
        """
        spec = dict(config.get("rope_scaling") or {})
        spec.update(config.get("rope_parameters") or {})
        kind = spec.get("rope_type", spec.get("type", "default"))
        if kind not in ROPE_TYPES:
            known = ", ".join(ROPE_TYPES)
            raise ConfigError(f"rope type {kind!r} is not supported; known: {known}")
        theta = float(spec.get("rope_theta", config.get("rope_theta", 10000.0)))
        if kind == "default":
            return cls(theta=theta)
        if "factor" not in spec:
            raise ConfigError(f"rope type {kind!r} needs a 'factor' in rope_scaling")
        factor = float(spec["factor"])
        attention = spec.get("attention_factor")
        if attention is None:
            attention = 0.1 * math.log(factor) + 1.0 if kind == "yarn" and factor > 1 else 1.0
        return cls(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_position=int(
                spec.get("original_max_position_embeddings")
                or config.get("max_position_embeddings", 8192)
            ),
            low_freq_factor=float(spec.get("low_freq_factor", 1.0)),
            high_freq_factor=float(spec.get("high_freq_factor", 4.0)),
            beta_fast=float(spec.get("beta_fast") or 32.0),
            beta_slow=float(spec.get("beta_slow") or 1.0),
            attention_factor=float(attention),
        )


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

        low = max(math.floor(channel(rope.beta_fast)), 0)
        high = min(math.ceil(channel(rope.beta_slow)), rotary_dim - 1)
        ramp = (jnp.arange(half, dtype=jnp.float32) - low) / max(high - low, 0.001)
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
