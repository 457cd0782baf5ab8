"""Matmul of rows sorted by expert with a stack of repacked NVFP4 weights."""

from fp4jax.ops.w4a16_grouped_matmul.api import explain_grouped, w4a16_grouped_matmul

__all__ = ["explain_grouped", "w4a16_grouped_matmul"]
