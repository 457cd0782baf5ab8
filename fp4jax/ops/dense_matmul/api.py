"""Matmul with an unquantized weight: signature and choice of formulation."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp4jax.ops.dense_matmul.xla import dot_cpu, dot_xla


def dense_matmul(
    x: Float[Array, "*batch k"],
    weight: Float[Array, "n k"],
    *,
    bias: Float[Array, " n"] | None = None,
    out_dtype=None,
) -> Float[Array, "*batch n"]:
    """``x @ weight.T + bias``, accumulated in f32.

    Args:
      x: bf16, f16 or f32.
      weight: any float dtype; brought to x's.
      bias: any float dtype, added in f32.
      out_dtype: of the result; x's dtype by default.
    """
    lead, n = x.shape[:-1], weight.shape[0]
    y = _multiply(x.reshape(math.prod(lead), x.shape[-1]), weight)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(out_dtype or x.dtype).reshape(*lead, n)


@functools.partial(jax.jit, inline=True)  # called by itself too, and then compiled once a shape
def _multiply(x: Array, weight: Array) -> Array:
    return jax.lax.platform_dependent(x, weight, cpu=dot_cpu, default=dot_xla)
