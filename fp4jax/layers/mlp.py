"""Feed-forward layers."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp4jax.checkpoints.keys import Key, fused, linear
from fp4jax.layers.linear import FusedLinear, Linear

GATE_UP = ("gate_proj", "up_proj")


class GatedMLP(nn.Module):
    """SwiGLU, ``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202); gate and up are one matmul."""

    hidden_size: int
    intermediate_size: int
    use_bias: bool = False
    quantized: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        shards = 2 * (self.intermediate_size,)
        gate_up = FusedLinear(shards, GATE_UP, self.use_bias, self.quantized, name="gate_up_proj")
        gate, up = gate_up(x)
        down = Linear(self.hidden_size, self.use_bias, self.quantized, name="down_proj")
        return down(jax.nn.silu(gate) * up)


class SquaredReluMLP(nn.Module):
    """``down(relu(up(x))²)`` (arXiv 2109.08668)."""

    hidden_size: int
    intermediate_size: int
    use_bias: bool = False
    quantized: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        up = Linear(self.intermediate_size, self.use_bias, self.quantized, name="up_proj")
        down = Linear(self.hidden_size, self.use_bias, self.quantized, name="down_proj")
        return down(squared_relu(up(x)))


def squared_relu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``relu(x)²``."""
    return jnp.square(jax.nn.relu(x))


def gated_mlp_keys(
    target: str,
    source: str,
    *,
    hidden_size: int,
    intermediate_size: int,
    bias: bool | None = None,
) -> tuple[Key, ...]:
    """Checkpoint keys of a :class:`GatedMLP` at tree path ``target``."""
    shards = dict.fromkeys(GATE_UP, intermediate_size)
    return (
        fused(f"{target}/gate_up_proj", source, shards, hidden_size, bias),
        linear(f"{target}/down_proj", f"{source}.down_proj", hidden_size, intermediate_size, bias),
    )


def squared_relu_mlp_keys(
    target: str,
    source: str,
    *,
    hidden_size: int,
    intermediate_size: int,
    bias: bool | None = None,
) -> tuple[Key, ...]:
    """Checkpoint keys of a :class:`SquaredReluMLP` at tree path ``target``."""
    return (
        linear(f"{target}/up_proj", f"{source}.up_proj", intermediate_size, hidden_size, bias),
        linear(f"{target}/down_proj", f"{source}.down_proj", hidden_size, intermediate_size, bias),
    )
