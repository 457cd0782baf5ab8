"""Causal depthwise convolution: signature and choice of implementation."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from fp4jax.ops.causal_conv1d.xla import causal_conv1d_xla


def causal_conv1d(
    x: Float[Array, "batch time channels"],
    weight: Float[Array, "channels width"],
    *,
    bias: Float[Array, " channels"] | None = None,
    state: Float[Array, "batch channels past"] | None = None,
    lengths: Int[Array, " batch"] | None = None,
    activation: str | None = None,
) -> tuple[Float[Array, "batch time channels"], Float[Array, "batch channels past"]]:
    """Each channel's last ``width`` inputs, weighted: ``y[t] = f(b + Σ weight[i] x[t-width+1+i])``.

    Args:
      x: inputs, right-padded.
      weight: any float dtype; the last column meets the present input.
      bias: any float dtype.
      state: the ``width - 1`` inputs before ``x``, oldest first; None where there are none (zeros).
      lengths: valid tokens of each row, at most ``time``; default all.
      activation: "silu" or None.

    Returns:
      The outputs in x's dtype (computed in f32; those of padding mean nothing), and the state
      after each row's last valid token, in the given state's dtype (else x's). A row of length 0
      keeps its state bit for bit.

    Raises:
      ValueError: an unknown activation, or a state of another width than the weight's.
    """
    if activation not in (None, "silu"):
        raise ValueError(f"activation {activation!r} is not known; use 'silu' or None")
    expected = (x.shape[0], x.shape[2], weight.shape[1] - 1)
    if state is not None and state.shape != expected:
        raise ValueError(f"state has shape {state.shape}; x and weight call for {expected}")
    return causal_conv1d_xla(
        x, weight, bias=bias, state=state, lengths=lengths, activation=activation
    )
