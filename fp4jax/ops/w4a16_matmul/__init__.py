"""Matmul of 16-bit (or f32) activations with a repacked NVFP4 weight."""

from fp4jax.ops.w4a16_matmul.api import explain, w4a16_matmul

__all__ = ["explain", "w4a16_matmul"]
