"""Causal depthwise convolution over time, with its state as an argument and a result."""

from fp4jax.ops.causal_conv1d.api import causal_conv1d
from fp4jax.ops.causal_conv1d.xla import causal_conv1d_state

__all__ = ["causal_conv1d", "causal_conv1d_state"]
