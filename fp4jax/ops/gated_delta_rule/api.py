"""The gated delta rule: signature and choice of implementation."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from fp4jax.ops.gated_delta_rule.xla import gated_delta_rule_chunked, gated_delta_rule_step

CHUNK = 64
"""Tokens of a prompt that are worked on as one block of matmuls."""


def gated_delta_rule(
    query: Float[Array, "batch time key_heads dk"],
    key: Float[Array, "batch time key_heads dk"],
    value: Float[Array, "batch time heads dv"],
    g: Float[Array, "batch time heads"],
    beta: Float[Array, "batch time heads"],
    *,
    state: Float32[Array, "batch heads dk dv"] | None = None,
    lengths: Int[Array, " batch"] | None = None,
    scale: float | None = None,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "batch time heads dv"], Float32[Array, "batch heads dk dv"]]:
    """Gated DeltaNet's recurrence (arXiv 2412.06464), from an explicit state to the next one.

    With ``S`` the state, each token first lets it decay, then moves what it answers for ``key``
    toward ``value``, then reads it::

        S = exp(g) S;  S = S + key ⊗ beta (value - Sᵀ key);  output = scale Sᵀ query

    One token a row takes that step; more are done in chunks, as matmuls (see ``xla.py``). All
    of it is f32.

    Args:
      query: read vectors, normalized by the caller if the model does so.
      key: write vectors, likewise; unit length keeps the recurrence stable.
      value: head h uses query and key head ``h // (heads / key_heads)``.
      g: logarithm of the decay, at most 0.
      beta: strength of the write, 0 to 1.
      state: before the first token; None for zeros.
      lengths: valid tokens of each row, at most ``time``; default all. Whatever padding holds, NaN
        included, leaves no trace in the state; a row of length 0 keeps it bit for bit.
      scale: of the output, default ``dk ** -0.5``.
      chunk: static; tokens in a chunk, a power of two.

    Returns:
      The outputs in value's dtype (those of padding mean nothing), and the state after each row's
      last valid token.

    Raises:
      ValueError: heads that do not divide, or a chunk that is no power of two.
    """
    time, key_heads, dk = key.shape[1:]
    heads = value.shape[2]
    if heads % key_heads:
        raise ValueError(f"{heads} value heads are not a multiple of {key_heads} key heads")
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk={chunk} must be a power of two")
    if state is None:
        state = jnp.zeros((key.shape[0], heads, dk, value.shape[3]), jnp.float32)
    if lengths is not None:
        valid = jnp.arange(time, dtype=lengths.dtype) < lengths[:, None]
        # A token without decay and without key changes nothing, exactly.
        query, key, value, g, beta = (
            jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, jnp.zeros_like(x))
            for x in (query, key, value, g, beta)
        )
    dtype = value.dtype
    query, key, value, g, beta = (x.astype(jnp.float32) for x in (query, key, value, g, beta))
    scale = dk**-0.5 if scale is None else scale
    if time == 1:
        out, state = gated_delta_rule_step(query, key, value, g, beta, state, scale=scale)
    else:
        out, state = gated_delta_rule_chunked(
            query, key, value, g, beta, state, scale=scale, chunk=chunk
        )
    return out.astype(dtype), state
