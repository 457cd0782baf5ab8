"""W8A16 matmul: signatures and checks. XLA serves every backend."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from fp4jax.errors import FormatError
from fp4jax.fp8 import FP8Weight
from fp4jax.ops.w8a16_matmul import xla

OP = "w8a16_matmul"


def w8a16_matmul(
    x: Float[Array, "*batch k"],
    w: FP8Weight,
    *,
    bias: Float[Array, " n"] | None = None,
    out_dtype=None,
) -> Float[Array, "*batch n"]:
    """``x @ W.T + bias`` for an FP8 weight.

    Values are widened exactly, accumulation is f32, the scale of each row is applied once to the
    f32 sums, the bias is added in f32, and one cast gives the result.

    Args:
      x: bf16, f16 or f32; any leading axes.
      w: one matrix (no stack), ``[N, K]``.
      bias: any float dtype.
      out_dtype: of the result; x's dtype by default.

    Raises:
      FormatError: shapes do not fit.
    """
    _check(x, w, 0)
    lead = x.shape[:-1]
    y = xla.fp8_matmul_xla(x.reshape(math.prod(lead), w.k), w)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(out_dtype or x.dtype).reshape(*lead, w.n)


def w8a16_grouped_matmul(
    x: Float[Array, "t k"], w: FP8Weight, group_sizes: Int32[Array, " e"], *, out_dtype=None
) -> Float[Array, "t n"]:
    """Row t times the matrix of the expert that owns it, ``out[t] = W[e(t)] @ x[t]``.

    Args:
      x: rows sorted by expert: the first ``group_sizes[0]`` belong to expert 0, and so on.
      w: a stack ``[E, N, K]``.
      group_sizes: not negative; empty groups are fine. Rows past their sum give 0.
      out_dtype: of the result; x's dtype by default.

    Raises:
      FormatError: shapes do not fit.
    """
    _check(x, w, 1)
    if group_sizes.shape != w.stack:
        raise FormatError(f"{OP}: group_sizes {group_sizes.shape} do not fit the weight {w.shape}")
    return xla.fp8_grouped_matmul_xla(x, w, group_sizes).astype(out_dtype or x.dtype)


def _check(x: Array, w: FP8Weight, axes: int) -> None:
    if len(w.stack) != axes:
        wanted = "one stack [E, N, K]" if axes else "one matrix [N, K]"
        raise FormatError(f"{OP}: the weight must be {wanted}, found {w.shape}")
    if x.shape[-1] != w.k or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise FormatError(
            f"{OP}: x must be bf16, f16 or f32 [..., {w.k}], found {x.dtype} {x.shape}"
        )
