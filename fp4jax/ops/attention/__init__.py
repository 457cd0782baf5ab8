"""Grouped-query causal attention over a cache."""

from fp4jax.ops.attention.api import attention

__all__ = ["attention"]
