"""W4A16 grouped matmul (experts) in plain XLA: any backend, any shape."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp4jax import marlin
from fp4jax.ops.w4a16_matmul.xla import matmul_xla


def unsupported_reason(spec: object) -> str | None:
    """Why this implementation cannot serve ``spec``: never, it serves everything."""
    del spec
    return None


def grouped_matmul_xla(
    x: Float[Array, "t k"],
    w: marlin.MarlinWeight,
    group_sizes: Int[Array, " e"],
    *,
    out_dtype,
) -> Float[Array, "t n"]:
    """Row t times the expert whose group holds it; rows past the last group are 0."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(x.shape[0])[:, None]

    def step(e: Array, out: Array) -> Array:
        expert = dataclasses.replace(
            w,
            words=w.words[e],
            scales=w.scales[e],
            global_scale=w.global_scale[e],
            fingerprint=w.fingerprint[e],
        )
        mine = (row < ends[e]) & (row >= ends[e] - group_sizes[e])
        return jnp.where(mine, matmul_xla(x, expert, out_dtype=out_dtype), out)

    zero = jnp.zeros((x.shape[0], w.n), out_dtype)
    return jax.lax.fori_loop(0, w.stack[0], step, zero)
