"""Grouped dynamic causal convolution: a short filter over time that each token adjusts.

DFlash2 drafters put one around attention and one around the MLP
(https://github.com/z-lab/dflash).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from fp4jax.checkpoints.keys import Key, linear, parameter
from fp4jax.layers import weights
from fp4jax.layers.linear import Linear

SIDES = 2
"""Filters of one layer: of a sublayer's input, and of its output."""


@dataclasses.dataclass(frozen=True)
class DynamicConvSizes:
    """What a :class:`DynamicConvKernels` is made of.

    Attributes:
      taps: tokens that a filter sees, the present one included.
      group: neighbouring channels that share the part which a token adjusts.
    """

    taps: int
    group: int


class DynamicConvKernels(nn.Module):
    """The filters of each token, for the input and the output of the sublayer that ``x`` enters.

    Parameters: ``base_kernel`` [2, taps, H], and ``kernel_projection``, from H to one value for
    each side, tap and group, which is added to the base.
    """

    sizes: DynamicConvSizes
    quantized: bool = True

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch time h"]
    ) -> tuple[Float32[Array, "batch time taps h"], Float32[Array, "batch time taps h"]]:
        taps, group = self.sizes.taps, self.sizes.group
        features = x.shape[-1]
        base: Any = weights.variable(
            self,
            "base_kernel",
            lambda key: weights.random_dense(key, SIDES * taps, features, x.dtype).reshape(
                SIDES, taps, features
            ),
        )
        count = SIDES * taps * (features // group)
        project = Linear(count, quantized=self.quantized, name="kernel_projection")
        dynamic = project(x, jnp.float32).reshape(*x.shape[:-1], SIDES, taps, features // group)
        kernels = base.astype(jnp.float32) + jnp.repeat(dynamic, group, axis=-1)
        return kernels[..., 0, :, :], kernels[..., 1, :, :]


def dynamic_conv(
    x: Float[Array, "batch time h"], kernels: Float32[Array, "batch time taps h"]
) -> Float[Array, "batch time h"]:
    """``y[t] = Σ kernels[t, i] x[t - i]``; what comes before ``x`` counts as zeros.

    Computed in f32, in x's dtype.
    """
    wide, time = x.astype(jnp.float32), x.shape[1]
    y = kernels[:, :, 0] * wide
    for i in range(1, kernels.shape[2]):
        y = y + kernels[:, :, i] * jnp.pad(wide, ((0, 0), (i, 0), (0, 0)))[:, :time]
    return y.astype(x.dtype)


def dynamic_conv_keys(
    target: str, source: str, *, hidden_size: int, sizes: DynamicConvSizes
) -> tuple[Key, ...]:
    """Checkpoint keys of a :class:`DynamicConvKernels` at tree path ``target``."""
    base, rows = f"{source}.base_kernel", SIDES * sizes.taps * (hidden_size // sizes.group)
    return (
        parameter(f"{target}/base_kernel", base, SIDES, sizes.taps, hidden_size),
        linear(f"{target}/kernel_projection", f"{source}.kernel_projection", rows, hidden_size),
    )
