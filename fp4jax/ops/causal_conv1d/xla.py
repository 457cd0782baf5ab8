"""Causal depthwise convolution in plain XLA, for any backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def causal_conv1d_xla(
    x: Float[Array, "batch time channels"],
    weight: Float[Array, "channels width"],
    *,
    bias: Float[Array, " channels"] | None,
    state: Float[Array, "batch channels past"] | None,
    lengths: Int[Array, " batch"] | None,
    activation: str | None,
) -> tuple[Float[Array, "batch time channels"], Float[Array, "batch channels past"]]:
    """See :func:`fp4jax.ops.causal_conv1d.causal_conv1d`."""
    batch, time, channels = x.shape
    width = weight.shape[1]
    if state is None:
        state = jnp.zeros((batch, channels, width - 1), x.dtype)
    seen = jnp.concatenate([state.swapaxes(1, 2).astype(x.dtype), x], axis=1)
    taps, wide = weight.astype(jnp.float32), seen.astype(jnp.float32)
    # A sum of shifted products fuses into one pass; XLA's grouped convolution is slow on CPUs.
    y = sum(
        (wide[:, i : i + time] * taps[:, i] for i in range(1, width)), wide[:, :time] * taps[:, 0]
    )
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    if activation == "silu":
        y = jax.nn.silu(y)
    return y.astype(x.dtype), causal_conv1d_state(x, state, lengths)


def causal_conv1d_state(
    x: Float[Array, "batch time channels"],
    state: Float[Array, "batch channels past"],
    lengths: Int[Array, " batch"] | None,
) -> Float[Array, "batch channels past"]:
    """The state of :func:`fp4jax.ops.causal_conv1d.causal_conv1d` after ``lengths`` of ``x``."""
    seen = jnp.concatenate([state.swapaxes(1, 2).astype(x.dtype), x], axis=1)
    if lengths is None:
        past = seen[:, x.shape[1] :]
    else:
        index = lengths[:, None] + jnp.arange(state.shape[2], dtype=lengths.dtype)
        past = jnp.take_along_axis(seen, index[:, :, None], axis=1)
    return past.swapaxes(1, 2).astype(state.dtype)
