"""Qwen3 mixture-of-experts models (arXiv 2505.09388).

Names as in Hugging Face ``Qwen3MoeForCausalLM``; experts are stored one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn

from fp4jax.architecture import Architecture
from fp4jax.checkpoints.hf_config import CONFIG_NAME, decoder_fields, flag, sequence, whole
from fp4jax.checkpoints.keys import Key
from fp4jax.errors import ConfigError
from fp4jax.layers.decoder import DecoderModel, decoder_keys
from fp4jax.layers.mlp import gated_mlp_keys
from fp4jax.layers.moe import SparseMoE, sparse_moe_keys
from fp4jax.models.qwen3 import Qwen3Block, Qwen3Config


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """Adds the experts; ``sparse`` says which layers have them."""

    moe_intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    sparse: tuple[bool, ...] = ()


class Qwen3MoeBlock(Qwen3Block):
    """Attention with normed queries and keys, then experts (or SwiGLU where a layer has none)."""

    def feed_forward(self) -> nn.Module:
        c = self.config
        if not c.sparse[self.index]:
            return super().feed_forward()
        return SparseMoE(
            c.hidden_size,
            c.moe_intermediate_size,
            c.num_experts,
            c.num_experts_per_tok,
            c.norm_topk_prob,
            quantized=self.quantized,
        )


class Qwen3Moe(DecoderModel):
    """The shared frame around :class:`Qwen3MoeBlock`."""

    def block(self, index: int) -> nn.Module:
        return Qwen3MoeBlock(self.config, index, self.quantized)


def qwen3_moe_config(hf: Mapping[str, Any]) -> Qwen3MoeConfig:
    """The sizes in a ``config.json``."""
    fields = decoder_fields(hf)
    step = whole(hf, "decoder_sparse_step", 1)
    dense = sequence(hf, "mlp_only_layers", int)
    layers = range(fields["num_hidden_layers"])
    # transformers 5 writes num_local_experts.
    count = "num_experts" if "num_experts" in hf else "num_local_experts"
    experts, chosen = whole(hf, count), whole(hf, "num_experts_per_tok")
    if chosen > experts:
        raise ConfigError(
            f"{CONFIG_NAME}: num_experts_per_tok = {chosen} is more than {count} = {experts}"
        )
    window = whole(hf, "sliding_window") if flag(hf, "use_sliding_window", False) else None
    return Qwen3MoeConfig(
        **fields,
        windows=(window,) * len(layers),  # all layers alike, unlike the dense models
        moe_intermediate_size=whole(hf, "moe_intermediate_size"),
        num_experts=experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=flag(hf, "norm_topk_prob", False),
        sparse=tuple(i not in dense and (i + 1) % step == 0 for i in layers),
    )


def qwen3_moe_keys(config: Qwen3MoeConfig) -> tuple[Key, ...]:
    """Checkpoint keys."""

    def mlp_keys(layer: int, target: str, source: str) -> tuple[Key, ...]:
        hidden = config.hidden_size
        if not config.sparse[layer]:
            width = config.intermediate_size
            return gated_mlp_keys(target, source, hidden_size=hidden, intermediate_size=width)
        return sparse_moe_keys(
            target,
            source,
            hidden_size=hidden,
            intermediate_size=config.moe_intermediate_size,
            count=config.num_experts,
        )

    return decoder_keys(config, qk_norm=True, mlp_keys=mlp_keys)


ARCHITECTURE = Architecture(
    name="Qwen3MoeForCausalLM", config=qwen3_moe_config, model=Qwen3Moe, keys=qwen3_moe_keys
)
