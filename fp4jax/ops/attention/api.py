"""Causal attention with grouped queries: signature and choice of implementation."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from fp4jax.ops.attention.xla import attention_xla


def attention(
    query: Float[Array, "batch time heads dim"],
    keys: Float[Array, "batch slots kv_heads dim"],
    values: Float[Array, "batch slots kv_heads dim"],
    positions: Int[Array, "batch time"],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Float[Array, "batch time heads dim"]:
    """Softmax attention of each query over the slots at or before its own position.

    Args:
      query: heads is a multiple of kv_heads; query head h reads key head h // (heads / kv_heads).
      keys: slot s holds the token at position s of its row.
      values: likewise.
      positions: position of each query token; later slots are hidden.
      scale: multiplier of the scores, default ``dim ** -0.5``.
      window: if given, only the last ``window`` positions (the own one included) are seen.

    Returns:
      In the query's dtype; scores, softmax and accumulation are f32.
    """
    return attention_xla(query, keys, values, positions, scale=scale, window=window)
