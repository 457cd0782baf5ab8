"""Mamba2's recurrence in plain XLA, for any backend: one token, or chunks of them as matmuls.

Within a chunk let ``s`` be the running sum of ``dt a``. What token i reads of what token j ≤ i of
its chunk wrote is ``exp(s_i - s_j) (c_i·b_j) dt_j x_j``, a masked product of matrices (the duality
of section 6 of arXiv 2405.21060); what it reads of older tokens is ``exp(s_i)`` times the state at
the chunk's start. Only that state goes from chunk to chunk. No exponent is ever positive.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float32

from fp4jax.ops.recurrence import scan_in_place


def mamba2_step(
    x: Float32[Array, "batch 1 heads dim"],
    dt: Float32[Array, "batch 1 heads"],
    a: Float32[Array, " heads"],
    b: Float32[Array, "batch 1 groups n"],
    c: Float32[Array, "batch 1 groups n"],
    state: Float32[Array, "batch heads dim n"],
) -> tuple[Float32[Array, "batch 1 heads dim"], Float32[Array, "batch heads dim n"]]:
    """One token a row; ``dt`` is the final time step. See :func:`fp4jax.ops.mamba2.mamba2`."""
    share = x.shape[2] // b.shape[2]
    write, read = (jnp.repeat(v[:, 0], share, axis=1) for v in (b, c))
    decay, written = jnp.exp(dt[:, 0] * a)[..., None], dt[:, 0, :, None] * x[:, 0]
    # The read sees the state once, before the write; b·c brings the write into it.
    known = decay * jnp.sum(state * read[:, :, None], axis=-1)
    out = known + jnp.sum(write * read, axis=-1, keepdims=True) * written
    return out[:, None], state * decay[..., None] + written[..., None] * write[:, :, None]


def mamba2_chunked(
    x: Float32[Array, "batch time heads dim"],
    dt: Float32[Array, "batch time heads"],
    a: Float32[Array, " heads"],
    b: Float32[Array, "batch time groups n"],
    c: Float32[Array, "batch time groups n"],
    state: Float32[Array, "batch heads dim n"],
    *,
    chunk: int,
) -> tuple[Float32[Array, "batch time heads dim"], Float32[Array, "batch heads dim n"]]:
    """Any number of tokens; ``dt`` as in :func:`mamba2_step`."""
    batch, time, heads, dim = x.shape
    groups = b.shape[2]
    split = (groups, heads // groups)  # r: heads that share a group
    chunk = min(chunk, time)
    count = -(-time // chunk)

    def chunked(value: Array, *parts: int) -> Array:
        """[batch, time, heads, …] to [count, batch, *parts, chunk, …], with tokens of zeros."""
        value = jnp.pad(value, ((0, 0), (0, count * chunk - time), *((0, 0),) * (value.ndim - 2)))
        value = value.reshape(batch, count, chunk, *parts, *value.shape[3:])
        return jnp.moveaxis(value, (1, 2), (0, 2 + len(parts)))

    write, read = chunked(b, groups), chunked(c, groups)
    written, g = chunked(dt[..., None] * x, *split), chunked(dt * a, *split)
    lower = jnp.tril(jnp.ones((chunk, chunk), jnp.float32))
    # span[i, j]: decay from token j to token i. Summed, not a difference of running sums, which
    # would lose the small spans beside strong decays.
    span = _matmul("...ik,kj->...ij", lower * g[..., None, :], jnp.tril(lower, -1))
    decay = jnp.where(lower > 0, jnp.exp(span), 0.0)
    since, until = jnp.exp(jnp.cumsum(g, axis=-1))[..., None], decay[..., -1, :, None]
    scores = decay * _matmul("mbgin,mbgjn->mbgij", read, write)[:, :, :, None]
    inside = _matmul("mbgrij,mbgrjp->mbgrip", scores, written)
    added = _matmul("mbgrjp,mbgjn->mbgrpn", until * written, write)

    def step(state: Array, added: Array, kept: Array) -> tuple[Array, Array]:
        return kept * state + added, state

    grouped = state.reshape(batch, *split, *state.shape[2:])
    grouped, before = scan_in_place(step, grouped, added, since[..., -1:, :])
    out = inside + since * _matmul("mbgin,mbgrpn->mbgrip", read, before)
    out = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(batch, count * chunk, heads, dim)
    return out[:, :time], grouped.reshape(state.shape)


def _matmul(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, precision=Precision.HIGHEST)
