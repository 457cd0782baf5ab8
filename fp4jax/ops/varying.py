"""Inside a ``shard_map``: over which mesh axes arrays vary."""

from __future__ import annotations

import jax
from jax import lax
from jaxtyping import Array


def vary_alike(*operands: Array) -> list[Array]:
    """The operands, all varying over the same mesh axes.

    A ``shard_map`` wants it said where an array that is the same on every shard (a loop's zeros,
    say) meets one that is not. Outside of one this changes nothing.
    """
    axes = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in operands))

    def cast(a: Array) -> Array:
        missing = tuple(axes - jax.typeof(a).manual_axis_type.varying)
        return lax.pcast(a, missing, to="varying") if missing else a

    return [cast(a) for a in operands]
