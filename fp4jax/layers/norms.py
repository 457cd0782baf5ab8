"""Normalization layers."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class RMSNorm(nn.Module):
    """``weight * x / rms(x)`` over the last axis, computed in f32 (arXiv 1910.07467).

    The normalized value is rounded to ``x.dtype`` before the weight, as most public models do;
    those with zero-centered weights round after it.

    Attributes:
      epsilon: added to the mean square.
      zero_centered: multiply by ``1 + weight``.
      rounded_last: round after the weight in any case.
      groups: neighbouring features that are normed together are the ``groups``-th part of them.
    """

    epsilon: float = 1e-6
    zero_centered: bool = False
    rounded_last: bool = False
    groups: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        fresh = jnp.zeros if self.zero_centered else jnp.ones
        weight = self.param("weight", lambda _: fresh(x.shape[-1], x.dtype))
        wide = x.astype(jnp.float32).reshape(*x.shape[:-1], self.groups, -1)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + jnp.float32(self.epsilon))
        normed = normed.reshape(x.shape)
        if self.zero_centered or self.rounded_last:
            factor = weight.astype(jnp.float32)
            return (normed * (1 + factor if self.zero_centered else factor)).astype(x.dtype)
        return normed.astype(x.dtype) * weight.astype(x.dtype)
