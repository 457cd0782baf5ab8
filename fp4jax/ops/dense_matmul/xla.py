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

from fp4jax.ops.row_blocks import by_row_blocks

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
    if m == 0 or x.dtype == weight.dtype == jnp.float32:
        return dot_xla(x, weight)
    if x.dtype == weight.dtype == jnp.bfloat16:
        return _dot(jnp.pad(x, ((0, max(LEAST_ROWS - m, 0)), (0, 0))), weight)[:m]
    if weight.dtype != cpu_weight_dtype(x) or x.dtype == jnp.float16:
        return by_row_blocks(_dot_wide, x, weight)
    high, middle, low = split_f32(x)
    # Smallest first, so that little is lost.
    parts = _dot(jnp.concatenate([low, middle, high]), weight).reshape(3, m, -1)
    return (parts[0] + parts[1]) + parts[2]


def cpu_weight_dtype(x: Float[Array, "m k"]) -> jnp.dtype:
    """The dtype in which the backend multiplies ``x`` with a weight whose values fit in bf16."""
    split = x.dtype == jnp.float32 and x.shape[0] <= SPLIT_ROWS
    return jnp.dtype(jnp.bfloat16 if split else x.dtype)


def _dot_wide(x: Array, weight: Array) -> Array:
    """As :func:`dot_xla`; f16 in f32, since the CPU has no fast f16 dot."""
    weight = weight.astype(x.dtype)
    if x.dtype == jnp.float16:
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    return dot_xla(x, weight)


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
