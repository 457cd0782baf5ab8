"""W4A16 grouped matmul (experts) in plain XLA: any backend, any shape.

Few rows on a CPU: a loop over rows that decodes the owner's matrix in registers, as the plain op
does. Otherwise: a loop over experts, each decoded once where it has rows and skipped where not.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from fp4jax import marlin
from fp4jax.ops.grouped import group_of_row, loop_over_groups
from fp4jax.ops.varying import vary_alike
from fp4jax.ops.w4a16_matmul.xla import decode_fast, decoded_dot, fused_rows

FUSED_PAIRS = 64
"""Most rows that the loop over rows serves; it decodes a matrix a row."""


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
    x, group_sizes, *leaves = vary_alike(x, group_sizes, *jax.tree.leaves(w))
    w = jax.tree.unflatten(jax.tree.structure(w), leaves)
    # As in the plain op: a decode must not be hoisted out of a generation loop.
    x, w = lax.optimization_barrier((x, w))
    sums = lax.platform_dependent(x, w, group_sizes, cpu=_accumulate_cpu, default=_accumulate)
    owner = group_of_row(group_sizes, x.shape[0])
    scale = marlin.per_row_global_scale(w)[jnp.minimum(owner, w.stack[0] - 1)]
    out = sums / scale if w.global_is_divisor else sums * scale
    return out.astype(out_dtype)


def _accumulate(x: Array, w: marlin.MarlinWeight, group_sizes: Array) -> Array:
    def prepare(e: Array) -> Array:
        return marlin.decode(take_expert(w, e), x.dtype)

    return loop_over_groups(x, group_sizes, w.n, prepare, decoded_dot, jnp.float32)


def _accumulate_cpu(x: Array, w: marlin.MarlinWeight, group_sizes: Array) -> Array:
    if x.shape[0] <= FUSED_PAIRS:
        return _row_by_row(x, w, group_of_row(group_sizes, x.shape[0]))
    if x.dtype == jnp.float16:  # the CPU has no fast f16 dot
        x = x.astype(jnp.float32)

    def prepare(e: Array) -> Array:
        return decode_fast(w.words[e], w.scales[e], x.dtype)[: w.n, : w.k]

    return loop_over_groups(x, group_sizes, w.n, prepare, decoded_dot, jnp.float32)


def _row_by_row(
    x: Float[Array, "t k"], w: marlin.MarlinWeight, owner: Int[Array, " t"]
) -> Float32[Array, "t n"]:
    def serve(row: Array, e: Array) -> Array:
        return fused_rows(row[None], w.words[e][None], w.scales[e][None])[0, : w.n]

    nothing, _ = vary_alike(jnp.zeros(w.n, jnp.float32), x)

    def step(args: tuple[Array, Array]) -> Array:
        row, e = args
        return lax.cond(e < w.stack[0], serve, lambda _row, _e: nothing, row, e)

    return lax.map(step, (x, owner))


def take_expert(w: marlin.MarlinWeight, e: Int[Array, ""]) -> marlin.MarlinWeight:
    """One matrix of the stack."""
    return dataclasses.replace(
        w,
        words=w.words[e],
        scales=w.scales[e],
        global_scale=w.global_scale[e],
        fingerprint=w.fingerprint[e],
    )
