"""Cache pytrees: what a sequence leaves behind, as an argument and a result, never as state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of one attention layer; slot s of a row holds the token at position s."""

    keys: Float[Array, "batch capacity kv_heads dim"]
    values: Float[Array, "batch capacity kv_heads dim"]

    @classmethod
    def zeros(cls, batch: int, capacity: int, kv_heads: int, dim: int, dtype) -> KVCache:
        """An empty cache."""
        shape = (batch, capacity, kv_heads, dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def write(
        self,
        keys: Float[Array, "batch time kv_heads dim"],
        values: Float[Array, "batch time kv_heads dim"],
        position: Int[Array, " batch"],
    ) -> KVCache:
        """Stores ``time`` tokens a row from ``position`` on.

        A write that would pass the end is shifted to end there, so callers keep position + time
        within the capacity. Slots of padding tokens are overwritten by later tokens and hidden
        until then, because a query sees only positions up to its own.
        """
        return KVCache(
            _write(self.keys, keys.astype(self.keys.dtype), position),
            _write(self.values, values.astype(self.values.dtype), position),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The whole model's cache: tokens held a row, and one entry a layer."""

    position: Int32[Array, " batch"]
    layers: tuple[Any, ...]


def _write(buffer: Array, update: Array, position: Int[Array, " batch"]) -> Array:
    def one(row: Array, new: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, new, start, axis=0)

    if buffer.shape[0] == 1:  # a batched start index would lower to a scatter
        return one(buffer[0], update[0], position[0])[None]
    return jax.vmap(one)(buffer, update, position)
