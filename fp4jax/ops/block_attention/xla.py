"""Attention of a block to its context and to itself in plain XLA, for any backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def block_attention_xla(
    query: Float[Array, "batch time heads dim"],
    keys: Float[Array, "batch time kv_heads dim"],
    values: Float[Array, "batch time kv_heads dim"],
    context_keys: Float[Array, "batch slots kv_heads dim"],
    context_values: Float[Array, "batch slots kv_heads dim"],
    lengths: Int[Array, " batch"],
    *,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> Float[Array, "batch time heads dim"]:
    """See :func:`fp4jax.ops.block_attention.block_attention`."""
    batch, time, heads, dim = query.shape
    kv_heads, slots = keys.shape[2], context_keys.shape[1]
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    grouped = query.reshape(batch, time, kv_heads, heads // kv_heads, dim)
    block = jnp.arange(time, dtype=jnp.int32)
    context = jnp.arange(slots, dtype=jnp.int32)
    ahead = block[None, :] - block[:, None]  # of a key, seen from a query
    inside = (ahead <= 0) if causal else jnp.ones_like(ahead, jnp.bool_)
    before = jnp.broadcast_to(context < lengths[:, None, None], (batch, time, slots))
    if window is not None:
        inside &= jnp.abs(ahead) < window
        positions = lengths[:, None, None] + block[None, :, None]
        before &= positions - context < window
    inside = jnp.broadcast_to(inside, (batch, time, time))

    def scores(keys: Array, seen: Array) -> Array:
        found = jnp.einsum(
            "bthgd,bshd->bhgts",
            grouped,
            keys.astype(query.dtype),
            precision=precision,
            preferred_element_type=jnp.float32,
        ) * jnp.float32(scale or dim**-0.5)
        return jnp.where(seen[:, None, None], found, -jnp.inf)

    both = [scores(context_keys, before), scores(keys, inside)]
    shares = jax.nn.softmax(jnp.concatenate(both, axis=-1), axis=-1).astype(query.dtype)

    def mix(shares: Array, values: Array) -> Array:
        return jnp.einsum(
            "bhgts,bshd->bthgd",
            shares,
            values.astype(query.dtype),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    out = mix(shares[..., :slots], context_values) + mix(shares[..., slots:], values)
    return out.astype(query.dtype).reshape(query.shape)
