"""W4A16 matmul: signature, checks, and the choice of implementation."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp4jax.errors import FormatError
from fp4jax.marlin import MarlinWeight
from fp4jax.ops import dispatch
from fp4jax.ops.w4a16_matmul import triton, xla

OP = "w4a16_matmul"

CANDIDATES = (
    dispatch.Candidate("triton", triton.unsupported_reason, triton.slower_reason),
    dispatch.Candidate("xla", xla.unsupported_reason, lambda spec: None),
)
"""In order of preference."""


def w4a16_matmul(
    x: Float[Array, "*batch k"],
    w: MarlinWeight,
    *,
    bias: Float[Array, " n"] | None = None,
    out_dtype=None,
    implementation: str | None = None,
) -> Float[Array, "*batch n"]:
    """``x @ W.T + bias`` for a repacked NVFP4 weight.

    Products of 4-bit codes and block scales are exact, accumulation is f32, the global scale of
    each fused shard is applied once to the f32 sums, the bias is added in f32, and one cast
    gives the result.

    Args:
      x: bf16, f16 or f32; any leading axes, none or empty ones included.
      w: one matrix (no stack), ``[N, K]``.
      bias: any float dtype.
      out_dtype: bf16, f16 or f32; x's dtype by default. ``jnp.float32`` gives f32 logits.
      implementation: None lets :func:`explain`'s choice decide; "xla" runs anywhere, "triton" on
        NVIDIA GPUs.

    Returns:
      ``[..., N]`` in ``out_dtype``.

    Raises:
      FormatError: shapes or dtypes do not fit.
      UnsupportedError: ``implementation`` is forced and cannot serve these inputs (where that
        depends on the platform, when the call is compiled).
    """
    out = _check(x, w, bias, out_dtype)
    return _matmul(x, w, bias, out_dtype=out, implementation=implementation)


def explain(
    x: Float[Array, "*batch k"] | jax.ShapeDtypeStruct,
    w: MarlinWeight,
    *,
    out_dtype=None,
    implementation: str | None = None,
) -> dispatch.Explanation:
    """The choice that :func:`w4a16_matmul` makes for these inputs, and why. Nothing is computed.

    A concrete array is judged on its own device, a shape on the default device.
    """
    out = _check(x, w, None, out_dtype)
    spec = dispatch.make_spec(OP, x, w, out, math.prod(x.shape[:-1]))
    return dispatch.choose(spec, CANDIDATES, implementation)


def _check(x, w: MarlinWeight, bias, out_dtype) -> jnp.dtype:
    out = dispatch.check_operands(OP, x, w, out_dtype)
    if w.stack:
        raise FormatError(
            f"{OP}: the weight {w.shape} is a stack; use w4a16_grouped_matmul for experts"
        )
    if bias is not None and bias.shape != (w.n,):
        raise FormatError(f"{OP}: bias {bias.shape} does not fit N = {w.n} of the weight {w.shape}")
    return out


@functools.partial(jax.jit, static_argnames=("out_dtype", "implementation"), inline=True)
def _matmul(x, w: MarlinWeight, bias, *, out_dtype, implementation):
    lead, m = x.shape[:-1], math.prod(x.shape[:-1])
    spec = dispatch.make_spec(OP, x, w, out_dtype, m)
    bodies = {
        "triton": lambda x, w, bias: triton.matmul_triton(x, w, bias=bias, out_dtype=out_dtype),
        "xla": lambda x, w, bias: xla.matmul_xla(x, w, bias=bias, out_dtype=out_dtype),
    }
    if m == 0 or w.n == 0:
        return jnp.zeros((*lead, w.n), out_dtype)
    out = dispatch.run(spec, CANDIDATES, implementation, bodies, x.reshape(m, w.k), w, bias)
    return out.reshape(*lead, w.n)
