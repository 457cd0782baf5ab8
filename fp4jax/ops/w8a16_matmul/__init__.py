"""Matmuls with FP8 weights and 16- or 32-bit activations."""

from fp4jax.ops.w8a16_matmul.api import w8a16_grouped_matmul, w8a16_matmul

__all__ = ["w8a16_grouped_matmul", "w8a16_matmul"]
