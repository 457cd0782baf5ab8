"""Causal attention in plain XLA, for any backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

QUERY_CHUNK = 512
"""Queries attended to at once; bounds the score matrix to [batch, heads, chunk, slots] f32."""


def attention_xla(
    query: Float[Array, "batch time heads dim"],
    keys: Float[Array, "batch slots kv_heads dim"],
    values: Float[Array, "batch slots kv_heads dim"],
    positions: Int[Array, "batch time"],
    *,
    scale: float | None,
    window: int | None,
) -> Float[Array, "batch time heads dim"]:
    """See :func:`fp4jax.ops.attention.attention`."""
    batch, time, heads, dim = query.shape
    kv_heads = keys.shape[2]
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    grouped = query.reshape(batch, time, kv_heads, heads // kv_heads, dim)
    keys, values = keys.astype(query.dtype), values.astype(query.dtype)
    slots = jnp.arange(keys.shape[1], dtype=jnp.int32)

    def attend(q: Array, at: Array) -> Array:
        scores = jnp.einsum(
            "bthgd,bshd->bhgts", q, keys, precision=precision, preferred_element_type=jnp.float32
        ) * jnp.float32(scale or dim**-0.5)
        seen = slots <= at[:, :, None]
        if window is not None:
            seen &= slots > at[:, :, None] - window
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        probabilities = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
        return jnp.einsum(
            "bhgts,bshd->bthgd",
            probabilities,
            values,
            precision=precision,
            preferred_element_type=jnp.float32,
        ).astype(query.dtype)

    if time <= QUERY_CHUNK:
        return attend(grouped, positions).reshape(query.shape)
    pad = -time % QUERY_CHUNK
    grouped = jnp.pad(grouped, ((0, 0), (0, pad), (0, 0), (0, 0), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, pad)))
    chunks = (time + pad) // QUERY_CHUNK
    out = jax.lax.map(
        lambda args: attend(*args),
        (
            grouped.reshape(batch, chunks, QUERY_CHUNK, *grouped.shape[2:]).swapaxes(0, 1),
            positions.reshape(batch, chunks, QUERY_CHUNK).swapaxes(0, 1),
        ),
    )
    return out.swapaxes(0, 1).reshape(batch, time + pad, heads, dim)[:, :time]
