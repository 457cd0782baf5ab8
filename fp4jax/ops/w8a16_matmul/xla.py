"""FP8 matmuls in plain XLA: widened where they are read, exactly, and scaled after the sum."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int32

from fp4jax.fp8 import FP8Weight
from fp4jax.ops.dense_matmul.xla import cpu_weight_dtype, dot_cpu, dot_xla
from fp4jax.ops.grouped import group_of_row, loop_over_groups
from fp4jax.ops.row_blocks import by_row_blocks
from fp4jax.ops.varying import vary_alike

_F16_EXPONENT = 2.0**8
"""e4m3's bits, put where f16 has its own, are the value divided by this."""


@functools.partial(jax.jit, inline=True)  # called by itself too, and then compiled once a shape
def fp8_matmul_xla(x: Float[Array, "m k"], w: FP8Weight) -> Float32[Array, "m n"]:
    """``x @ W.T`` in f32. See :func:`fp4jax.ops.w8a16_matmul.w8a16_matmul`."""
    # The barrier ties the values to x, so that a generation loop is not given a widened copy of
    # the whole weight, made once outside of it.
    x, values = lax.optimization_barrier((x, w.values))
    sums = lax.platform_dependent(x, values, cpu=_dot_cpu, default=_dot)
    return sums * w.scale


@functools.partial(jax.jit, inline=True)
def fp8_grouped_matmul_xla(
    x: Float[Array, "t k"], w: FP8Weight, group_sizes: Int32[Array, " e"]
) -> Float32[Array, "t n"]:
    """Rows of ``x``, sorted by expert, times their expert's matrix, in f32.

    Experts are visited one by one and only where they have rows.
    """
    x, values, scale, group_sizes = vary_alike(x, w.values, w.scale, group_sizes)
    x, values = lax.optimization_barrier((x, values))

    def dot(rows: Array, matrix: Array) -> Array:
        return lax.platform_dependent(rows, matrix, cpu=_dot_cpu, default=_dot)

    n = w.n
    sums = loop_over_groups(x, group_sizes, n, lambda e: values[e], dot, jnp.float32)
    owner = group_of_row(group_sizes, x.shape[0])
    return sums * jnp.take(scale, owner, axis=0, mode="clip")


def _dot(x: Array, values: Array) -> Array:
    return dot_xla(x, values.astype(x.dtype))


def _dot_cpu(x: Array, values: Array) -> Array:
    dtype = cpu_weight_dtype(x)
    return by_row_blocks(lambda x, rows: dot_cpu(x, widen(rows).astype(dtype)), x, values)


def widen(values: Float8e4m3fn[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Exact f32 of finite values, through f16's bits: half the time of the CPU backend's own."""
    bits = lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint16)
    half = ((bits & jnp.uint16(0x80)) << 8) | ((bits & jnp.uint16(0x7F)) << 7)
    return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * _F16_EXPONENT
