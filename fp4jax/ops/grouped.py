"""Looping over the groups of a grouped matmul in XLA, with no work for empty ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

BLOCK_ROWS = 64
"""Rows multiplied at once; a group's last block may hold fewer of its own."""


def group_of_row(group_sizes: Int[Array, " e"], rows: int) -> Int32[Array, " t"]:
    """The group that owns each row, e for rows past the last group."""
    ends = jnp.cumsum(group_sizes)
    at = jnp.arange(rows, dtype=ends.dtype)
    return jnp.searchsorted(ends, at, side="right").astype(jnp.int32)


def loop_over_groups(
    x: Float[Array, "t k"],
    group_sizes: Int[Array, " e"],
    n: int,
    prepare: Callable[[Int[Array, ""]], Any],
    multiply: Callable[[Float[Array, "b k"], Any], Float[Array, "b n"]],
    out_dtype: Any,
) -> Float[Array, "t n"]:
    """``multiply(rows of group e, prepare(e))`` for each group that has rows; others are 0.

    Args:
      x: rows sorted by group; inside a ``shard_map`` it varies over all axes that the matrices
        vary over (:func:`fp4jax.ops.varying.vary_alike`).
      group_sizes: rows of each.
      n: output features.
      prepare: called with a group's (traced) index, once a group that has rows.
      multiply: called with a block of rows, which may belong to neighbours and are then dropped.
      out_dtype: of the result.
    """
    rows = x.shape[0]
    block = min(BLOCK_ROWS, rows)
    # Room for a block to run past the last row instead of being shifted back by the slice.
    padded = jnp.pad(x, ((0, block), (0, 0)))
    ends = jnp.cumsum(group_sizes)
    # Any value that comes from x, which the CPU backend then makes no sooner than it is needed.
    out = jnp.broadcast_to(padded[:, :1].astype(out_dtype), (rows + block, n))

    def serve(e: Array, out: Array) -> Array:
        matrix, end = prepare(e), ends[e]

        def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            begin, out = carry
            y = multiply(lax.dynamic_slice_in_dim(padded, begin, block), matrix).astype(out_dtype)
            old = lax.dynamic_slice_in_dim(out, begin, block)
            mine = (begin + jnp.arange(block, dtype=begin.dtype) < end)[:, None]
            y = jnp.where(mine, y, old)
            return begin + block, lax.dynamic_update_slice_in_dim(out, y, begin, axis=0)

        return lax.while_loop(lambda carry: carry[0] < end, step, (end - group_sizes[e], out))[1]

    def visit(e: Array, out: Array) -> Array:
        return lax.cond(group_sizes[e] > 0, serve, lambda _, out: out, e, out)

    out = lax.fori_loop(0, group_sizes.shape[0], visit, out)[:rows]
    return jnp.where((jnp.arange(rows, dtype=ends.dtype) < ends[-1])[:, None], out, 0)
