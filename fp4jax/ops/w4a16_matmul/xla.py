"""W4A16 matmul in plain XLA: any backend, any shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp4jax import marlin


def unsupported_reason(spec: object) -> str | None:
    """Why this implementation cannot serve ``spec``: never, it serves everything."""
    del spec
    return None


def matmul_xla(
    x: Float[Array, "m k"],
    w: marlin.MarlinWeight,
    *,
    bias: Float[Array, " n"] | None = None,
    out_dtype,
) -> Float[Array, "m n"]:
    """``x @ w.T (+ bias)``, accumulated in f32, cast once at the end."""
    out = jax.lax.dot_general(
        x,
        marlin.decode(w, x.dtype),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    out = marlin.apply_global_scale(w, out)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(out_dtype)
