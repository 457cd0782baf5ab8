"""What the linear recurrences share: their scan."""

from __future__ import annotations

from collections.abc import Callable

from jax import lax
from jaxtyping import Array


def scan_in_place(
    step: Callable[..., tuple[Array, Array]],
    state: Array,
    buffer: Array,
    *others: Array,
) -> tuple[Array, Array]:
    """``lax.scan`` over leading axes, whose results take the place of one of its inputs.

    Besides the memory, this spares a prefill on a CPU one buffer a layer that is there from the
    start: a scan's results begin as zeros, which wait for nothing.

    Args:
      step: ``(state, buffer[i], *(x[i] for x in others))`` to the next state and the new
        ``buffer[i]``.

    Returns:
      The last state, and the buffer.
    """

    def one(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, buffer = carry
        at = [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in (buffer, *others)]
        state, result = step(state, *at)
        return state, lax.dynamic_update_index_in_dim(buffer, result, i, 0)

    return lax.fori_loop(0, buffer.shape[0], one, (state, buffer))
