"""The gated delta rule in plain XLA, for any backend: one token, or chunks of them as matmuls.

Within a chunk let ``c`` be the running sum of ``g``. What the tokens write, ``d = beta (v - Sᵀk)``,
depends on what was written before through a unit lower triangular system
``(I + A) d = beta (v - exp(c) k S₀)`` with ``A[i, j] = beta_i exp(c_i - c_j) k_i·k_j`` for j < i
and ``S₀`` the state at the chunk's start. Its inverse is applied to ``beta v`` and to
``beta exp(c) k`` of all chunks at once (the WY representation, section 3 of arXiv 2412.06464);
only the products with ``S₀`` go from chunk to chunk. No exponent is ever positive.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float32

from fp4jax.ops.recurrence import scan_in_place


def gated_delta_rule_step(
    query: Float32[Array, "batch 1 key_heads dk"],
    key: Float32[Array, "batch 1 key_heads dk"],
    value: Float32[Array, "batch 1 heads dv"],
    g: Float32[Array, "batch 1 heads"],
    beta: Float32[Array, "batch 1 heads"],
    state: Float32[Array, "batch heads dk dv"],
    *,
    scale: float,
) -> tuple[Float32[Array, "batch 1 heads dv"], Float32[Array, "batch heads dk dv"]]:
    """One token a row. See :func:`fp4jax.ops.gated_delta_rule.gated_delta_rule`."""
    share = value.shape[2] // key.shape[2]
    q, k = (jnp.repeat(x[:, 0], share, axis=1) for x in (query, key))
    v, decay, rate = value[:, 0], jnp.exp(g[:, 0, :, None]), beta[:, 0, :, None]
    # Both reads see the state once, before the write; q·k brings the write into the second.
    known = decay * jnp.sum(state * k[..., None], axis=-2)
    read = decay * jnp.sum(state * q[..., None], axis=-2)
    written = rate * (v - known)
    out = scale * (read + jnp.sum(q * k, axis=-1, keepdims=True) * written)
    return out[:, None], state * decay[..., None] + k[..., None] * written[..., None, :]


def gated_delta_rule_chunked(
    query: Float32[Array, "batch time key_heads dk"],
    key: Float32[Array, "batch time key_heads dk"],
    value: Float32[Array, "batch time heads dv"],
    g: Float32[Array, "batch time heads"],
    beta: Float32[Array, "batch time heads"],
    state: Float32[Array, "batch heads dk dv"],
    *,
    scale: float,
    chunk: int,
) -> tuple[Float32[Array, "batch time heads dv"], Float32[Array, "batch heads dk dv"]]:
    """Any number of tokens. See :func:`fp4jax.ops.gated_delta_rule.gated_delta_rule`."""
    batch, time, key_heads, _ = key.shape
    heads, dv = value.shape[2:]
    chunk = min(chunk, 1 << (time - 1).bit_length())
    count = -(-time // chunk)

    def chunked(x: Array, *groups: int) -> Array:
        """[batch, time, heads, …] to [count, batch, *groups, chunk, …], with tokens of zeros."""
        x = jnp.pad(x, ((0, 0), (0, count * chunk - time), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(batch, count, chunk, *groups, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (0, 2 + len(groups)))

    groups = (key_heads, heads // key_heads)  # r: value heads that share a key head
    q, k = chunked(query * scale, key_heads), chunked(key, key_heads)
    v, g, rate = chunked(value, *groups), chunked(g, *groups), chunked(beta, *groups)[..., None]
    lower = jnp.tril(jnp.ones((chunk, chunk), jnp.float32))
    # span[i, j]: decay from token j to token i. Summed, not a difference of running sums, which
    # would lose the small spans beside strong decays.
    span = _matmul("...ik,kj->...ij", lower * g[..., None, :], jnp.tril(lower, -1))
    decay = jnp.where(lower > 0, jnp.exp(span), 0.0)
    since, until = jnp.exp(jnp.cumsum(g, axis=-1))[..., None], decay[..., -1, :, None]
    similar = _matmul("nbhid,nbhjd->nbhij", k, k)[:, :, :, None]
    inverse = inverse_of_unit_lower(rate * decay * jnp.tril(similar, -1))
    values = _matmul("nbhrij,nbhrjv->nbhriv", inverse, rate * v)
    keys = _matmul("nbhrij,nbhrjd->nbhrid", inverse, rate * since * k[:, :, :, None])
    scores = decay * _matmul("nbhid,nbhjd->nbhij", q, k)[:, :, :, None]

    def step(state, values, q, k, since, until, keys, scores) -> tuple[Array, Array]:
        written = values - _matmul("bhrid,bhrdv->bhriv", keys, state)
        out = since * _matmul("bhid,bhrdv->bhriv", q, state)
        out = out + _matmul("bhrij,bhrjv->bhriv", scores, written)
        state = state * since[..., -1:, :]
        return state + _matmul("bhid,bhriv->bhrdv", k, until * written), out

    grouped = state.reshape(batch, *groups, *state.shape[2:])
    grouped, out = scan_in_place(step, grouped, values, q, k, since, until, keys, scores)
    out = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(batch, count * chunk, heads, dv)
    return out[:, :time], grouped.reshape(state.shape)


def inverse_of_unit_lower(a: Float32[Array, "*stack n n"]) -> Float32[Array, "*stack n n"]:
    """``(I + a)⁻¹`` of strictly lower triangular ``a``, n a power of two.

    The inverses P⁻¹ and Q⁻¹ of neighbouring diagonal blocks are merged, all pairs at once:
    ``[[P, 0], [B, Q]]⁻¹ = [[P⁻¹, 0], [-Q⁻¹ B P⁻¹, Q⁻¹]]``. As accurate as substitution (a power
    series in ``a`` is not: equal keys make its terms huge), but all of it is matmuls, which are
    f32 on every backend and partition over heads.
    """
    n = a.shape[-1]
    row, column = jnp.arange(n)[:, None], jnp.arange(n)
    found = jnp.broadcast_to(jnp.eye(n, dtype=a.dtype), a.shape)
    size = 1
    while size < n:
        # Below the diagonal, in the same block of the next size but not of this one.
        corner = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
        corners = jnp.where(corner, a, 0.0)
        if size > 1:
            corners = _matmul("...ij,...jk->...ik", corners, found)
            corners = _matmul("...ij,...jk->...ik", found, corners)
        found = found - corners
        size *= 2
    return found


def _matmul(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, precision=Precision.HIGHEST)
