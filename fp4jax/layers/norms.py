"""Normalization layers."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class RMSNorm(nn.Module):
    """``weight * x / rms(x)`` over the last axis, computed in f32 (arXiv 1910.07467).

    The normalized value is rounded to ``x.dtype`` before the weight, as the public models do;
    those with zero-centered weights round after it.

    Attributes:
      epsilon: added to the mean square.
      zero_centered: multiply by ``1 + weight``.
    """

    epsilon: float = 1e-6
    zero_centered: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        fresh = jnp.zeros if self.zero_centered else jnp.ones
        weight = self.param("weight", lambda _: fresh(x.shape[-1], x.dtype))
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + jnp.float32(self.epsilon))
        if self.zero_centered:
            return (normed * (1 + weight.astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * weight.astype(x.dtype)
