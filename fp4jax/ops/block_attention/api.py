"""Attention of a block to its context and to itself: signature and choice of implementation."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from fp4jax.ops.block_attention.xla import block_attention_xla


def block_attention(
    query: Float[Array, "batch time heads dim"],
    keys: Float[Array, "batch time kv_heads dim"],
    values: Float[Array, "batch time kv_heads dim"],
    context_keys: Float[Array, "batch slots kv_heads dim"],
    context_values: Float[Array, "batch slots kv_heads dim"],
    lengths: Int[Array, " batch"],
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
) -> Float[Array, "batch time heads dim"]:
    """Softmax attention of each query over its row's context and over the block.

    The context is read where it lies: nothing of it is copied, and the block is not written to it.

    Args:
      query: heads is a multiple of kv_heads; query head h reads key head h // (heads / kv_heads).
      keys: of the block, whose token t is at position ``lengths + t``.
      values: likewise.
      context_keys: slot s holds the token at position s of its row.
      context_values: likewise.
      lengths: context tokens of each row, 0 to ``slots``; later slots are hidden.
      causal: whether a token sees of the block only itself and those before it; else all of it.
      scale: multiplier of the scores, default ``dim ** -0.5``.
      window: if given, only positions less than ``window`` away are seen, on either side.

    Returns:
      In the query's dtype; scores, softmax and accumulation are f32.
    """
    return block_attention_xla(
        query,
        keys,
        values,
        context_keys,
        context_values,
        lengths,
        causal=causal,
        scale=scale,
        window=window,
    )
