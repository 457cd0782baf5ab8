"""Qwen3 dense models (arXiv 2505.09388); names as in Hugging Face ``Qwen3ForCausalLM``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn

from fp4jax.architecture import Architecture
from fp4jax.checkpoints.hf_config import decoder_fields, sliding_windows
from fp4jax.checkpoints.keys import Key
from fp4jax.layers.attention import Attention
from fp4jax.layers.decoder import DecoderBlock, DecoderConfig, DecoderModel, decoder_keys


@dataclasses.dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """Adds the attention window of each layer, None where a layer sees everything."""

    windows: tuple[int | None, ...] = ()


class Qwen3Block(DecoderBlock):
    """Attention with normed queries and keys, then SwiGLU."""

    def mixer(self) -> nn.Module:
        c = self.config
        return Attention(
            c.hidden_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            c.rope,
            qk_norm=c.rms_norm_eps,
            window=c.windows[self.index],
            use_bias=c.attention_bias,
            quantized=self.quantized,
        )


class Qwen3(DecoderModel):
    """The shared frame around :class:`Qwen3Block`."""

    def block(self, index: int) -> nn.Module:
        return Qwen3Block(self.config, index, self.quantized)


def qwen3_config(hf: Mapping[str, Any]) -> Qwen3Config:
    """The sizes in a ``config.json``."""
    return Qwen3Config(**decoder_fields(hf), windows=sliding_windows(hf))


def qwen3_keys(config: Qwen3Config) -> tuple[Key, ...]:
    """Checkpoint keys."""
    return decoder_keys(config, qk_norm=True)


ARCHITECTURE = Architecture(
    name="Qwen3ForCausalLM", config=qwen3_config, model=Qwen3, keys=qwen3_keys
)
