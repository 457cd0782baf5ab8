"""Linear layers whose repacked weight is a variable of the parameter tree."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp4jax.layers import weights
from fp4jax.layers.weights import Weight


class Linear(nn.Module):
    """``y = x Wᵀ + b``. Parameters: ``weight`` (NVFP4 or dense), optionally ``bias`` [N].

    Attributes:
      features: N.
      use_bias: whether ``init`` makes a bias; a loaded tree says for itself.
      quantized: whether ``init`` makes an NVFP4 weight; a loaded tree says for itself.
    """

    features: int
    use_bias: bool = False
    quantized: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*batch k"], out_dtype=None) -> Float[Array, "*batch n"]:
        k = x.shape[-1]

        def init(key: Array) -> Weight:
            if self.quantized:
                return weights.random_quantized((self.features,), k)(key)
            return weights.random_dense(key, self.features, k, x.dtype)

        weight = weights.variable(self, "weight", init)
        return weights.matmul(x, weight, bias=bias_of(self, self.features), out_dtype=out_dtype)


class FusedLinear(nn.Module):
    """Several linears of one input (q+k+v, gate+up) as one repacked weight.

    Parameters: ``weight``, one node with an output shard each, where all are stored alike; else
    one ``<name>_weight`` a shard (a checkpoint that leaves one of them unquantized). ``bias`` is
    one vector either way.

    Attributes:
      shards: output features of each.
      names: their checkpoint names.
    """

    shards: tuple[int, ...]
    names: tuple[str, ...]
    use_bias: bool = False
    quantized: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*batch k"]) -> tuple[Float[Array, "*batch n"], ...]:
        k, total = x.shape[-1], sum(self.shards)
        bias = bias_of(self, total)
        ends = [sum(self.shards[: i + 1]) for i in range(len(self.shards))]
        spans = [slice(end - n, end) for n, end in zip(self.shards, ends, strict=True)]
        if weights.has_variable(self, split_weight_name(self.names[0])):
            parts: list[Weight] = [
                self.get_variable("params", split_weight_name(name)) for name in self.names
            ]
            return tuple(
                weights.matmul(x, part, bias=None if bias is None else bias[span])
                for part, span in zip(parts, spans, strict=True)
            )

        def init(key: Array) -> Weight:
            if self.quantized:
                return weights.random_quantized(self.shards, k)(key)
            return weights.random_dense(key, total, k, x.dtype)

        y = weights.matmul(x, weights.variable(self, "weight", init), bias=bias)
        return tuple(y[..., span] for span in spans)


def split_weight_name(name: str) -> str:
    """Parameter name of one shard of a :class:`FusedLinear` that is stored in parts."""
    return f"{name}_weight"


def bias_of(module: Linear | FusedLinear, features: int) -> Float[Array, " n"] | None:
    """The tree's bias, a zero one in ``init`` where asked for, else None."""
    if weights.has_variable(module, "bias"):
        return module.get_variable("params", "bias")
    if module.use_bias and module.is_initializing():
        return module.param("bias", lambda _: jnp.zeros(features, jnp.float32))
    return None
