"""Sparse mixture of experts over stacked expert weights."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from fp4jax.checkpoints.keys import Key, experts, linear, parameter
from fp4jax.layers import weights
from fp4jax.layers.linear import Linear, split_weight_name
from fp4jax.layers.mlp import (
    GATE_UP,
    GatedMLP,
    SquaredReluMLP,
    gated_mlp_keys,
    squared_relu,
    squared_relu_mlp_keys,
)
from fp4jax.layers.routing import SigmoidRouting, route, route_by_sigmoid, sort_by_expert


class ExpertLinear(nn.Module):
    """One linear (or several of one input, fused) an expert, as one stacked weight.

    Parameters: ``weight`` ``[E, N, K]``, NVFP4 or dense, or one ``<name>_weight`` a shard where a
    checkpoint stores the shards in different formats.
    """

    experts: int
    shards: tuple[int, ...]
    names: tuple[str, ...]
    quantized: bool = True

    @nn.compact
    def __call__(
        self, x: Float[Array, "tokens k"], group_sizes: Int32[Array, " experts"]
    ) -> tuple[Float[Array, "tokens n"], ...]:
        """``x`` is sorted by expert, ``group_sizes`` rows each; one result a shard."""
        k = x.shape[-1]
        if weights.has_variable(self, split_weight_name(self.names[0])):
            parts: list[weights.Weight] = [
                self.get_variable("params", split_weight_name(name)) for name in self.names
            ]
            return tuple(weights.grouped_matmul(x, part, group_sizes) for part in parts)

        def init(key: Array) -> weights.Weight:
            if self.quantized:
                return weights.random_quantized(self.shards, k, (self.experts,))(key)
            dense = weights.random_dense(key, self.experts * sum(self.shards), k, x.dtype)
            return dense.reshape(self.experts, -1, k)

        y = weights.grouped_matmul(x, weights.variable(self, "weight", init), group_sizes)
        ends = [sum(self.shards[: i + 1]) for i in range(len(self.shards))]
        return tuple(y[:, e - n : e] for n, e in zip(self.shards, ends, strict=True))


class SparseMoE(nn.Module):
    """Routed experts: each token goes to its ``top_k`` likeliest.

    Attributes:
      hidden_size: features of input and output.
      intermediate_size: features inside an expert.
      experts: how many there are.
      top_k: how many serve a token.
      normalize: divide the chosen experts' shares by their sum.
      quantized: whether ``init`` makes NVFP4 experts; the router never is.
      gated: experts are SwiGLU; else ``down(relu(up(x))²)``.
      latent_size: features that experts read and write, between two projections that all share
        (``fc1_latent_proj``, ``fc2_latent_proj``); None where those are ``hidden_size`` and there
        is no projection.
      sigmoid: routing by sigmoids, with a bias ``choice_bias`` that has a say in the choice but not
        in the shares; None for a softmax.
      shared_size: features inside ``shared_experts``, which is of the same kind and sees every
        token; None where there is none.
      use_bias: biases on what all tokens share (latent projections, shared expert) made by
        ``init``.
    """

    hidden_size: int
    intermediate_size: int
    experts: int
    top_k: int
    normalize: bool = True
    quantized: bool = True
    gated: bool = True
    latent_size: int | None = None
    sigmoid: SigmoidRouting | None = None
    shared_size: int | None = None
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        rows = x.reshape(-1, x.shape[-1])
        logits = Linear(self.experts, quantized=False, name="gate")(rows, jnp.float32)
        if self.sigmoid is None:
            chosen, shares = route(logits, self.top_k, self.normalize)
        else:
            bias = self.param("choice_bias", nn.initializers.zeros, (self.experts,))
            chosen, shares = route_by_sigmoid(
                logits, bias, self.sigmoid, self.top_k, self.normalize
            )
        order, group_sizes = sort_by_expert(chosen, self.experts)
        if self.latent_size is not None:
            rows = self._latent(self.latent_size, "fc1_latent_proj")(rows)
        inside = self._inside(rows[order // self.top_k], group_sizes)
        width = self.latent_size or self.hidden_size
        down = ExpertLinear(
            self.experts, (width,), ("down_proj",), self.quantized, name="down_proj"
        )
        (y,) = down(inside, group_sizes)
        back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
        y = y[back].reshape(-1, self.top_k, width).astype(jnp.float32)
        y = jnp.sum(y * shares[..., None], axis=1).astype(x.dtype)
        if self.latent_size is not None:
            y = self._latent(self.hidden_size, "fc2_latent_proj")(y)
        if self.shared_size is not None:
            mlp = GatedMLP if self.gated else SquaredReluMLP
            sizes = (self.hidden_size, self.shared_size)
            shared = mlp(*sizes, self.use_bias, self.quantized, name="shared_experts")
            y = y + shared(x).reshape(y.shape)
        return y.reshape(x.shape)

    def _inside(
        self, grouped: Float[Array, "tokens k"], group_sizes: Int32[Array, " experts"]
    ) -> Float[Array, "tokens n"]:
        """What an expert's last projection reads."""
        if self.gated:
            shards = 2 * (self.intermediate_size,)
            gate_up = ExpertLinear(
                self.experts, shards, GATE_UP, self.quantized, name="gate_up_proj"
            )
            gate, up = gate_up(grouped, group_sizes)
            return jax.nn.silu(gate) * up
        only = (self.intermediate_size,)
        (up,) = ExpertLinear(self.experts, only, ("up_proj",), self.quantized, name="up_proj")(
            grouped, group_sizes
        )
        return squared_relu(up)

    def _latent(self, features: int, name: str) -> Linear:
        return Linear(features, self.use_bias, self.quantized, name=name)


def sparse_moe_keys(
    target: str,
    source: str,
    *,
    hidden_size: int,
    intermediate_size: int,
    count: int,
    gated: bool = True,
    latent_size: int | None = None,
    choice_bias: bool = False,
    shared_size: int | None = None,
    bias: bool | None = None,
) -> tuple[Key, ...]:
    """Checkpoint keys of a :class:`SparseMoE` whose experts are stored one by one."""
    h, width = hidden_size, latent_size or hidden_size
    into = GATE_UP if gated else ("up_proj",)
    first, inside = dict.fromkeys(into, intermediate_size), {"down_proj": width}
    name, parent = "gate_up_proj" if gated else "up_proj", f"{source}.experts"
    keys = [linear(f"{target}/gate", f"{source}.gate", count, h)]
    if choice_bias:
        stored = f"{source}.gate.e_score_correction_bias"
        keys.append(parameter(f"{target}/choice_bias", stored, count))
    if latent_size is not None:
        sizes = {"fc1_latent_proj": (width, h), "fc2_latent_proj": (h, width)}
        keys += [linear(f"{target}/{n}", f"{source}.{n}", *sizes[n], bias) for n in sizes]
    keys.append(experts(f"{target}/{name}", parent, first, width, count))
    keys.append(experts(f"{target}/down_proj", parent, inside, intermediate_size, count))
    if shared_size is not None:
        shared_keys = gated_mlp_keys if gated else squared_relu_mlp_keys
        keys += shared_keys(
            f"{target}/shared_experts",
            f"{source}.shared_experts",
            hidden_size=h,
            intermediate_size=shared_size,
            bias=bias,
        )
    return tuple(keys)
