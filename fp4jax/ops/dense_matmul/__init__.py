"""Matmul with an unquantized weight, stored [N, K] and maybe narrower than the activations."""

from fp4jax.ops.dense_matmul.api import dense_matmul

__all__ = ["dense_matmul"]
