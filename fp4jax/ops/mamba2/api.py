"""Mamba2's recurrence: signature and choice of implementation."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from fp4jax.ops.mamba2.xla import mamba2_chunked, mamba2_step

SSD_CHUNK = 64
"""Tokens of a prompt that are worked on as one block of matmuls."""


def mamba2(
    x: Float[Array, "batch time heads dim"],
    dt: Float[Array, "batch time heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "batch time groups n"],
    c: Float[Array, "batch time groups n"],
    *,
    d: Float[Array, " heads"] | None = None,
    dt_bias: Float[Array, " heads"] | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    state: Float32[Array, "batch heads dim n"] | None = None,
    lengths: Int[Array, " batch"] | None = None,
    chunk: int = SSD_CHUNK,
) -> tuple[Float[Array, "batch time heads dim"], Float32[Array, "batch heads dim n"]]:
    """Mamba2's selective state space (arXiv 2405.21060), from an explicit state to the next one.

    With ``S`` the state and ``r = clip(softplus(dt + dt_bias), *dt_limit)`` the time step, each
    token lets the state decay, writes to it, and reads it::

        S = exp(r a) S + r x ⊗ b;  output = S c + d x

    One token a row takes that step; more are done in chunks, as matmuls (see ``xla.py``). All of
    it is f32. The limit holds in both, so that a sequence gives the same however it is cut.

    Args:
      x: what is written.
      dt: time step before bias and softplus.
      a: rate of decay, negative.
      b: write vectors; head h uses group ``h // (heads / groups)``.
      c: read vectors, likewise.
      d: weight of the input that goes past the state; None for none.
      dt_bias: None for zeros.
      dt_limit: static; smallest and largest time step.
      state: before the first token; None for zeros.
      lengths: valid tokens of each row, at most ``time``; default all. Whatever padding holds, NaN
        included, leaves no trace in the state; a row of length 0 keeps it bit for bit.
      chunk: static; tokens in a chunk.

    Returns:
      The outputs in x's dtype (those of padding mean nothing), and the state after each row's
      last valid token.

    Raises:
      ValueError: heads that do not divide, an empty chunk, or limits out of order.
    """
    batch, time, heads, dim = x.shape
    groups, n = b.shape[2:]
    if heads % groups:
        raise ValueError(f"{heads} heads are not a multiple of {groups} groups")
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be positive")
    if not 0 <= dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"dt_limit={dt_limit} must be 0 <= smallest <= largest")
    if state is None:
        state = jnp.zeros((batch, heads, dim, n), jnp.float32)
    dtype = x.dtype
    x, dt, a, b, c = (value.astype(jnp.float32) for value in (x, dt, a, b, c))
    if dt_bias is not None:
        dt = dt + dt_bias.astype(jnp.float32)
    dt = jnp.clip(jax.nn.softplus(dt), *dt_limit)
    if lengths is not None:
        valid = jnp.arange(time, dtype=lengths.dtype) < lengths[:, None]
        # A time step of 0 changes nothing, exactly.
        x, dt, b, c = (
            jnp.where(valid.reshape(batch, time, *(1,) * (value.ndim - 2)), value, 0.0)
            for value in (x, dt, b, c)
        )
    if time == 1:
        out, state = mamba2_step(x, dt, a, b, c, state)
    else:
        out, state = mamba2_chunked(x, dt, a, b, c, state, chunk=chunk)
    if d is not None:
        out = out + d.astype(jnp.float32)[:, None] * x
    return out.astype(dtype), state
