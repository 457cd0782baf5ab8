"""Dense matmul in XLA, and the form in which its CPU backend is fast for few rows.

XLA's CPU backend has a fast bf16 x bf16 -> f32 dot for two rows or more, but takes a slow path
for one row, and for f32 rows it first writes the weight out in f32 (a copy of the whole output
head at every token; inside a loop it even keeps that copy). So a single row is padded, and f32
rows are split into three bf16 parts that sum to them exactly.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

LEAST_ROWS = 4
SPLIT_ROWS = 64
"""Most f32 rows that are split; more of them are worth widening the weight for."""


def dot_xla(x: Float[Array, "m k"], weight: Float[Array, "n k"]) -> Float32[Array, "m n"]:
    """``x @ weight.T`` in x's dtype, f32 accumulation; f32 at full precision."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return _dot(x, weight.astype(x.dtype), precision)


def dot_cpu(x: Float[Array, "m k"], weight: Float[Array, "n k"]) -> Float32[Array, "m n"]:
    """The same numbers (to f32 rounding) in the backend's fast form."""
    m = x.shape[0]
    if weight.dtype != jnp.bfloat16 or not 0 < m <= SPLIT_ROWS or x.dtype == jnp.float16:
        return dot_xla(x, weight)
    if x.dtype == jnp.bfloat16:
        return _dot(jnp.pad(x, ((0, max(LEAST_ROWS - m, 0)), (0, 0))), weight)[:m]
    high, middle, low = split_f32(x)
    # Smallest first, so that little is lost.
    parts = _dot(jnp.concatenate([low, middle, high]), weight).reshape(3, m, -1)
    return (parts[0] + parts[1]) + parts[2]


def split_f32(x: Float32[Array, "*shape"]) -> tuple[Float[Array, "*shape"], ...]:
    """Three bf16 arrays, largest first, whose sum is ``x`` (24 bits = 3 times 8)."""
    parts = []
    for _ in range(3):
        # The compiler may not cancel the round trip to bf16 and back.
        parts.append(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))
        x = x - parts[-1]
    return tuple(part.astype(jnp.bfloat16) for part in parts)


def _dot(x: Array, weight: Array, precision: lax.Precision | None = None) -> Array:
    return lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
