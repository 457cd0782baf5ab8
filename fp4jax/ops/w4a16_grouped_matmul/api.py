"""Grouped W4A16 matmul (experts): signature, checks, and the choice of implementation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp4jax.errors import FormatError
from fp4jax.marlin import MarlinWeight
from fp4jax.ops import dispatch
from fp4jax.ops.w4a16_grouped_matmul import triton, xla

OP = "w4a16_grouped_matmul"

CANDIDATES = (
    dispatch.Candidate("triton", triton.unsupported_reason, triton.slower_reason),
    dispatch.Candidate("xla", xla.unsupported_reason, lambda spec: None),
)
"""In order of preference."""


def w4a16_grouped_matmul(
    x: Float[Array, "t k"],
    w: MarlinWeight,
    group_sizes: Int[Array, " e"],
    *,
    out_dtype=None,
    implementation: str | None = None,
) -> Float[Array, "t n"]:
    """Row t times the matrix of the expert that owns it, ``out[t] = W[e(t)] @ x[t]``.

    Args:
      x: rows sorted by expert: the first ``group_sizes[0]`` belong to expert 0, and so on. bf16,
        f16 or f32.
      w: a stack ``[E, N, K]``.
      group_sizes: i32, not negative; empty groups are fine. Rows past their sum give 0.
      out_dtype: bf16, f16 or f32; x's dtype by default.
      implementation: as in :func:`fp4jax.ops.w4a16_matmul.w4a16_matmul`.

    Returns:
      ``[T, N]`` in ``out_dtype``, numerics as the plain op's.

    Raises:
      FormatError: shapes or dtypes do not fit.
      UnsupportedError: ``implementation`` is forced and cannot serve these inputs.
    """
    out = _check(x, w, group_sizes, out_dtype)
    return _grouped_matmul(x, w, group_sizes, out_dtype=out, implementation=implementation)


def explain_grouped(
    x: Float[Array, "t k"] | jax.ShapeDtypeStruct,
    w: MarlinWeight,
    *,
    out_dtype=None,
    implementation: str | None = None,
) -> dispatch.Explanation:
    """The choice that :func:`w4a16_grouped_matmul` makes, and why. Nothing is computed."""
    out = _check(x, w, None, out_dtype)
    spec = dispatch.make_spec(OP, x, w, out, x.shape[0])
    return dispatch.choose(spec, CANDIDATES, implementation)


def _check(x, w: MarlinWeight, group_sizes, out_dtype) -> jnp.dtype:
    out = dispatch.check_operands(OP, x, w, out_dtype)
    if len(w.stack) != 1:
        raise FormatError(f"{OP}: the weight must be one stack [E, N, K], found {w.shape}")
    if len(x.shape) != 2:
        raise FormatError(f"{OP}: x must be [T, K], rows sorted by expert, found {x.shape}")
    if group_sizes is not None and (
        group_sizes.shape != w.stack or group_sizes.dtype != jnp.dtype("int32")
    ):
        raise FormatError(
            f"{OP}: group_sizes must be int32 {w.stack} for the weight {w.shape}, "
            f"found {group_sizes.dtype} {group_sizes.shape}"
        )
    return out


@functools.partial(jax.jit, static_argnames=("out_dtype", "implementation"), inline=True)
def _grouped_matmul(x, w: MarlinWeight, group_sizes, *, out_dtype, implementation):
    spec = dispatch.make_spec(OP, x, w, out_dtype, x.shape[0])
    bodies = {
        "triton": lambda x, w, sizes: triton.grouped_matmul_triton(
            x, w, sizes, out_dtype=out_dtype
        ),
        "xla": lambda x, w, sizes: xla.grouped_matmul_xla(x, w, sizes, out_dtype=out_dtype),
    }
    if x.shape[0] == 0 or w.n == 0 or w.stack[0] == 0:
        return jnp.zeros((x.shape[0], w.n), out_dtype)
    return dispatch.run(spec, CANDIDATES, implementation, bodies, x, w, group_sizes)
