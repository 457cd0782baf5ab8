"""Matmuls that decode or widen their matrix, a block of its rows at a time.

XLA's CPU backend schedules a whole program by what is ready, and a decode waits for nothing but
its weight: left to itself, a prefill decodes every matrix of the model before it multiplies with
the first. A loop is one step to the scheduler, so that one block is alive at a time, and that
block stays in the cache between its decode and its dot.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Shaped

from fp4jax.ops.varying import vary_alike

BLOCK_ELEMENTS = 1 << 21
"""Elements of a decoded block; measured best among powers of two on a CPU."""
WHOLE_ELEMENTS = 1 << 14
"""Matrices of no more elements are not cut: a loop for each would only slow compilation."""


def block_rows(rows: int, k: int) -> int:
    """Rows of a block: ``rows`` where one matrix is too small to be worth a loop."""
    if rows * k <= WHOLE_ELEMENTS:
        return rows
    # Two at least, because a loop of one step would be taken apart again.
    return max(1, min(BLOCK_ELEMENTS // k, -(-rows // 2)))


def by_row_blocks(
    multiply: Callable[..., Float32[Array, "m b"]],
    x: Float[Array, "m k"],
    *weight: Array,
) -> Float32[Array, "m n"]:
    """``multiply(x, *weight)``, computed from blocks of the weight's rows.

    Args:
      multiply: of ``x`` and ``b`` rows of each array, ``x @ rows.T``; a row's result may not depend
        on the rows beside it.
      weight: arrays ``[n, ...]``, which together hold the matrix.
    """
    rows = weight[0].shape[0]
    block = block_rows(rows, x.shape[1])
    if block >= rows:
        return multiply(x, *weight)
    x, *arrays = vary_alike(x, *weight)  # inside a shard_map, as the result will
    # Every row is written. Zeros would be ready, hence made, before any layer has run.
    out = jnp.broadcast_to(x[:, :1].astype(jnp.float32), (x.shape[0], rows))

    def step(i: Array, out: Array) -> Array:
        # The last block is moved back to end with the matrix: some rows are computed twice.
        start = jnp.minimum(i * block, rows - block)
        parts = [slice_rows(part, start, block) for part in arrays]
        return lax.dynamic_update_slice_in_dim(out, multiply(x, *parts), start, axis=1)

    return lax.fori_loop(0, -(-rows // block), step, out)


def slice_rows(
    part: Shaped[Array, "*shape"], start: Int[Array, ""], count: int
) -> Shaped[Array, "*block"]:
    """``count`` rows from ``start`` on; in a loop on a CPU it is these alone that are widened."""
    # Bound to the step, or the whole array would be converted before the loop; and as integers,
    # because the backend does other things than arithmetic to narrow floats in f32.
    start, part = lax.optimization_barrier((start, part))
    bits = lax.bitcast_convert_type(part, f"uint{8 * part.dtype.itemsize}")
    return lax.bitcast_convert_type(lax.dynamic_slice_in_dim(bits, start, count), part.dtype)
