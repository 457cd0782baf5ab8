"""Normalization layers."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class RMSNorm(nn.Module):
    """``weight * x / rms(x)`` over the last axis, computed in f32 (arXiv 1910.07467).

    The normalized value is rounded to ``x.dtype`` before the weight, as the public models do.
    """

    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        weight = self.param("weight", lambda _: jnp.ones(x.shape[-1], x.dtype))
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + jnp.float32(self.epsilon))).astype(x.dtype)
        return normed * weight.astype(x.dtype)
