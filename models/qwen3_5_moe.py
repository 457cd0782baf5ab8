"""Qwen3.5 and Qwen3.6 mixture-of-experts models: the dense layers' mixers, and experts.

Names as in Hugging Face ``Qwen3_5MoeForCausalLM`` and ``Qwen3_5MoeForConditionalGeneration``, of
which the text model is served. https://huggingface.co/Qwen
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp4jax.architecture import Architecture
from fp4jax.checkpoints.hf_config import CONFIG_NAME, whole
from fp4jax.checkpoints.keys import Key, linear
from fp4jax.errors import ConfigError
from fp4jax.layers.linear import Linear
from fp4jax.layers.mlp import GatedMLP, gated_mlp_keys
from fp4jax.layers.moe import SparseMoE, sparse_moe_keys
from fp4jax.models.qwen3_5 import (
    NOT_TEXT,
    Qwen3_5,
    Qwen3_5Block,
    Qwen3_5Config,
    qwen3_5_fields,
    qwen3_5_keys,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeConfig(Qwen3_5Config):
    """Adds the experts; ``intermediate_size`` is the shared expert's."""

    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int


class SharedExpertMoE(nn.Module):
    """Routed experts, and one that sees every token: ``routed(x) + sigmoid(gate(x)) shared(x)``."""

    config: Qwen3_5MoeConfig
    quantized: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        c = self.config
        routed = SparseMoE(
            c.hidden_size,
            c.moe_intermediate_size,
            c.num_experts,
            c.num_experts_per_tok,
            quantized=self.quantized,
            name="routed",
        )
        shared = GatedMLP(
            c.hidden_size, c.intermediate_size, quantized=self.quantized, name="shared_expert"
        )
        gate = Linear(1, quantized=False, name="shared_expert_gate")(x, jnp.float32)
        return routed(x) + jax.nn.sigmoid(gate).astype(x.dtype) * shared(x)


class Qwen3_5MoeBlock(Qwen3_5Block):
    """Gated DeltaNet or gated attention, then experts."""

    def feed_forward(self) -> nn.Module:
        return SharedExpertMoE(self.config, self.quantized)


class Qwen3_5Moe(Qwen3_5):
    """The shared frame around :class:`Qwen3_5MoeBlock`."""

    def block(self, index: int) -> nn.Module:
        return Qwen3_5MoeBlock(self.config, index, self.quantized)


def qwen3_5_moe_config(hf: Mapping[str, Any]) -> Qwen3_5MoeConfig:
    """The sizes in a ``config.json``."""
    shared = whole(hf, "shared_expert_intermediate_size")
    fields = qwen3_5_fields({**hf, "intermediate_size": shared})
    experts, chosen = whole(hf, "num_experts"), whole(hf, "num_experts_per_tok")
    if chosen > experts:
        raise ConfigError(
            f"{CONFIG_NAME}: num_experts_per_tok = {chosen} is more than num_experts = {experts}"
        )
    return Qwen3_5MoeConfig(
        **fields,
        moe_intermediate_size=whole(hf, "moe_intermediate_size"),
        num_experts=experts,
        num_experts_per_tok=chosen,
    )


def qwen3_5_moe_keys(config: Qwen3_5MoeConfig) -> tuple[Key, ...]:
    """Checkpoint keys."""
    c = config

    def mlp_keys(layer: int, target: str, source: str) -> tuple[Key, ...]:
        del layer
        return (
            *sparse_moe_keys(
                f"{target}/routed",
                source,
                hidden_size=c.hidden_size,
                intermediate_size=c.moe_intermediate_size,
                count=c.num_experts,
            ),
            *gated_mlp_keys(
                f"{target}/shared_expert",
                f"{source}.shared_expert",
                hidden_size=c.hidden_size,
                intermediate_size=c.intermediate_size,
            ),
            linear(
                f"{target}/shared_expert_gate", f"{source}.shared_expert_gate", 1, c.hidden_size
            ),
        )

    return qwen3_5_keys(c, mlp_keys)


ARCHITECTURE = Architecture(
    name="Qwen3_5MoeForConditionalGeneration",
    other_names=("Qwen3_5MoeForCausalLM",),
    config=qwen3_5_moe_config,
    model=Qwen3_5Moe,
    keys=qwen3_5_moe_keys,
    skip=NOT_TEXT,
)
