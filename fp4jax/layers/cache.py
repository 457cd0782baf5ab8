"""Cache pytrees: what a sequence leaves behind, as an argument and a result, never as state."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from fp4jax.errors import EngineMismatchError


class RecurrentCache(Protocol):
    """An entry whose tokens cannot be taken back by position: a running state.

    Such an entry is on trial (:class:`Trial`) while the tokens of a pass may still be refused.
    """

    def advance(self, inputs: Any, lengths: Int32[Array, " batch"]) -> Any:
        """The entry after the first ``lengths`` tokens of a pass, by the ops that the pass used.

        Args:
          inputs: the pytree that the layer left in the trial: what its state is updated with,
            projections done, so that no weight is read again.
          lengths: tokens of each row that are kept; a row of 0 keeps its state bit for bit.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trial:
    """A recurrent layer's entry in a pass whose tokens may be refused, all but a prefix.

    A layer that is handed one reads ``before`` and returns ``Trial(before, inputs)`` in place of
    an advanced entry; :meth:`Cache.commit` makes that the entry after the prefix that is kept.

    Attributes:
      before: the entry as it was, a :class:`RecurrentCache`.
      inputs: None until the pass has run; then what ``before.advance`` takes.
    """

    before: Any
    inputs: Any = None


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

    def on_trial(self) -> Cache:
        """For a pass whose tokens may be refused; what comes out of it is to be committed.

        Keys and values are taken back by position alone: slots past a row's position are never
        seen. Every entry that can ``advance`` goes on trial.
        """
        layers = (Trial(entry) if hasattr(entry, "advance") else entry for entry in self.layers)
        return Cache(self.position, tuple(layers))

    def commit(self, position: Int32[Array, " batch"], lengths: Int32[Array, " batch"]) -> Cache:
        """The cache as if the pass had been given the first ``lengths`` tokens of each row alone.

        Args:
          position: before the pass.
          lengths: tokens of the pass that are kept, 0 to its width.
        """
        layers = (
            entry.before.advance(entry.inputs, lengths) if isinstance(entry, Trial) else entry
            for entry in self.layers
        )
        return Cache(position + lengths, tuple(layers))


def check_entries(owner: str, cache: Cache, wanted: Cache) -> None:
    """Checks that ``cache`` is laid out as ``owner`` lays out its own; dtypes are the caller's.

    Args:
      owner: name of the model.
      cache: offered to it; entries may be on trial.
      wanted: an empty one for as many rows and tokens, or the shapes of it.

    Raises:
      EngineMismatchError: another number of layers or rows, or an entry of another kind or size;
        the first one is named.
    """
    remedy = "this cache is another model's; begin with one that init_cache of this model makes"
    if len(cache.layers) != len(wanted.layers):
        raise EngineMismatchError(
            f"{owner} has {len(wanted.layers)} layers, but the cache has {len(cache.layers)}: "
            f"{remedy}"
        )
    if cache.position.shape != wanted.position.shape:
        raise EngineMismatchError(
            f"{owner} was given {wanted.position.shape[0]} rows of tokens, but the cache holds "
            f"{cache.position.shape[0]} rows"
        )
    for i, (entry, expected) in enumerate(zip(cache.layers, wanted.layers, strict=True)):
        entry = entry.before if isinstance(entry, Trial) else entry
        if type(entry) is not type(expected):
            kept, found = (
                "nothing" if x is None else f"a {type(x).__name__}" for x in (expected, entry)
            )
            raise EngineMismatchError(
                f"layer {i} of {owner} keeps {kept}, but the cache has {found} there: {remedy}"
            )
        if expected is None:
            continue
        for field in dataclasses.fields(expected):
            ours, theirs = (tuple(getattr(x, field.name).shape) for x in (expected, entry))
            if ours != theirs:
                raise EngineMismatchError(
                    f"layer {i} of {owner} keeps {field.name} of shape {list(ours)}, but the cache "
                    f"has {list(theirs)} there: {remedy}"
                )


def _write(buffer: Array, update: Array, position: Int[Array, " batch"]) -> Array:
    def one(row: Array, new: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, new, start, axis=0)

    if buffer.shape[0] == 1:  # a batched start index would lower to a scatter
        return one(buffer[0], update[0], position[0])[None]
    return jax.vmap(one)(buffer, update, position)
