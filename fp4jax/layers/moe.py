"""Sparse mixture of experts over stacked expert weights."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from fp4jax.checkpoints.keys import Key, experts, linear
from fp4jax.layers import weights
from fp4jax.layers.linear import Linear, split_weight_name
from fp4jax.layers.mlp import GATE_UP


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
    """Softmax-routed SwiGLU experts: each token goes to its ``top_k`` likeliest.

    Attributes:
      hidden_size: features of input and output.
      intermediate_size: features inside an expert.
      experts: how many there are.
      top_k: how many serve a token.
      normalize: divide the chosen probabilities by their sum.
      quantized: whether ``init`` makes NVFP4 experts; the router never is.
    """

    hidden_size: int
    intermediate_size: int
    experts: int
    top_k: int
    normalize: bool = True
    quantized: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        rows = x.reshape(-1, x.shape[-1])
        router = Linear(self.experts, quantized=False, name="gate")
        chosen, shares = route(router(rows, jnp.float32), self.top_k, self.normalize)
        order, group_sizes = sort_by_expert(chosen, self.experts)
        grouped = rows[order // self.top_k]
        shards = 2 * (self.intermediate_size,)
        gate_up = ExpertLinear(self.experts, shards, GATE_UP, self.quantized, name="gate_up_proj")
        gate, up = gate_up(grouped, group_sizes)
        down = ExpertLinear(
            self.experts, (self.hidden_size,), ("down_proj",), self.quantized, name="down_proj"
        )
        (y,) = down(jax.nn.silu(gate) * up, group_sizes)
        back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
        y = y[back].reshape(-1, self.top_k, self.hidden_size).astype(jnp.float32)
        return jnp.sum(y * shares[..., None], axis=1).astype(x.dtype).reshape(x.shape)


def route(
    logits: Float32[Array, "tokens experts"], top_k: int, normalize: bool
) -> tuple[Int32[Array, "tokens top"], Float32[Array, "tokens top"]]:
    """The ``top_k`` likeliest experts of each token and their share of its output."""
    shares, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), top_k)
    if normalize:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    return chosen, shares


def sort_by_expert(
    chosen: Int32[Array, "tokens top"], experts: int
) -> tuple[Int32[Array, " pairs"], Int32[Array, " experts"]]:
    """(token, choice) pairs in order of their expert, and how many each expert got."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    return order, jnp.bincount(flat, length=experts).astype(jnp.int32)


def sparse_moe_keys(
    target: str, source: str, *, hidden_size: int, intermediate_size: int, count: int
) -> tuple[Key, ...]:
    """Checkpoint keys of a :class:`SparseMoE` whose experts are stored one by one."""
    gate_up = dict.fromkeys(GATE_UP, intermediate_size)
    inside = {"down_proj": hidden_size}
    return (
        linear(f"{target}/gate", f"{source}.gate", count, hidden_size),
        experts(f"{target}/gate_up_proj", f"{source}.experts", gate_up, hidden_size, count),
        experts(f"{target}/down_proj", f"{source}.experts", inside, intermediate_size, count),
    )
