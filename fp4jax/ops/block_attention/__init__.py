"""Attention of a block of tokens to a context in a cache and to itself."""

from fp4jax.ops.block_attention.api import block_attention

__all__ = ["block_attention"]
