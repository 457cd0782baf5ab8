"""Qwen3.5 and Qwen3.6 dense models: Gated DeltaNet layers with attention layers between them.

Names as in Hugging Face ``Qwen3_5ForCausalLM`` and ``Qwen3_5ForConditionalGeneration``, of which
the text model is served. https://huggingface.co/Qwen
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from fp4jax.architecture import Architecture
from fp4jax.checkpoints.hf_config import (
    CONFIG_NAME,
    decoder_fields,
    flag,
    mapping,
    real,
    sequence,
    whole,
)
from fp4jax.checkpoints.keys import Key, Skip
from fp4jax.errors import ConfigError
from fp4jax.layers.attention import Attention, attention_keys
from fp4jax.layers.decoder import DecoderBlock, DecoderConfig, DecoderModel, decoder_keys
from fp4jax.layers.gated_delta_net import DeltaNetSizes, GatedDeltaNet, gated_delta_net_keys
from fp4jax.layers.norms import RMSNorm

LINEAR, FULL = "linear_attention", "full_attention"

NOT_TEXT = (
    Skip(r"(model\.)?visual\..*", "vision encoder; only the text model is served"),
    Skip(r"(model\.)?mtp\..*", "multi-token prediction head, which only drafts tokens"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(DecoderConfig):
    """Adds the kind of each layer and what the two kinds need.

    Attributes:
      layer_types: ``"linear_attention"`` or ``"full_attention"``, a layer each.
      delta_net: sizes of the linear attention layers.
      rotary_dim: channels of a head that positions rotate.
      attn_output_gate: whether attention layers gate their output.
    """

    layer_types: tuple[str, ...]
    delta_net: DeltaNetSizes
    rotary_dim: int
    attn_output_gate: bool = True


class Qwen3_5Block(DecoderBlock):
    """Gated DeltaNet or gated attention, then SwiGLU, each after a norm with ``1 + weight``."""

    @nn.nowrap
    def mixer_name(self) -> str:
        return "linear_attn" if self.config.layer_types[self.index] == LINEAR else "self_attn"

    def mixer(self) -> nn.Module:
        c = self.config
        if c.layer_types[self.index] == LINEAR:
            return GatedDeltaNet(c.hidden_size, c.delta_net, c.rms_norm_eps, self.quantized)
        return Attention(
            c.hidden_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            c.rope,
            qk_norm=c.rms_norm_eps,
            use_bias=c.attention_bias,
            quantized=self.quantized,
            rotary_dim=c.rotary_dim,
            zero_centered_norm=True,
            gated=c.attn_output_gate,
        )

    def new_norm(self) -> nn.Module:
        return RMSNorm(self.config.rms_norm_eps, zero_centered=True)


class Qwen3_5(DecoderModel):
    """The shared frame around :class:`Qwen3_5Block`."""

    def block(self, index: int) -> nn.Module:
        return Qwen3_5Block(self.config, index, self.quantized)

    def new_norm(self) -> nn.Module:
        return RMSNorm(self.config.rms_norm_eps, zero_centered=True)

    @nn.nowrap
    def block_cache(self, index: int, batch: int, capacity: int, dtype: jnp.dtype) -> Any:
        """A state of fixed size in linear attention layers, keys and values in the others."""
        if self.config.layer_types[index] == LINEAR:
            return self.config.delta_net.empty_cache(batch, dtype)
        return super().block_cache(index, batch, capacity, dtype)


def qwen3_5_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of :class:`Qwen3_5Config`.

    Raises:
      ConfigError: a field is missing, has the wrong type, or contradicts another.
    """
    fields = decoder_fields(hf)
    head_dim = fields["head_dim"]
    # transformers 5 keeps the factor among the rope parameters, 4 beside them.
    stated = {
        "partial_rotary_factor": hf.get("partial_rotary_factor"),
        **mapping(hf, "rope_scaling"),
        **mapping(hf, "rope_parameters"),
    }
    factor = real(stated, "partial_rotary_factor", 0.25)
    rotary_dim = int(head_dim * factor)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(
            f"{CONFIG_NAME}: partial_rotary_factor = {factor} of head_dim = {head_dim} is not an "
            "even number of channels"
        )
    sizes = DeltaNetSizes(
        key_heads=whole(hf, "linear_num_key_heads"),
        value_heads=whole(hf, "linear_num_value_heads"),
        key_dim=whole(hf, "linear_key_head_dim"),
        value_dim=whole(hf, "linear_value_head_dim"),
        conv_width=whole(hf, "linear_conv_kernel_dim"),
    )
    if sizes.value_heads % sizes.key_heads:
        raise ConfigError(
            f"{CONFIG_NAME}: linear_num_value_heads = {sizes.value_heads} is not a multiple of "
            f"linear_num_key_heads = {sizes.key_heads}"
        )
    return {
        **fields,
        "layer_types": _layer_types(hf, fields["num_hidden_layers"]),
        "delta_net": sizes,
        "rotary_dim": rotary_dim,
        "attn_output_gate": flag(hf, "attn_output_gate", True),
    }


def _layer_types(hf: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    types = sequence(hf, "layer_types", str)
    if not types:
        interval = whole(hf, "full_attention_interval", 4)
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(layers))
    if len(types) != layers or not all(kind in (LINEAR, FULL) for kind in types):
        raise ConfigError(
            f"{CONFIG_NAME}: layer_types must be {layers} of {LINEAR}, {FULL}, found "
            f"{list(types)!r:.80}"
        )
    return types


def qwen3_5_config(hf: Mapping[str, Any]) -> Qwen3_5Config:
    """The sizes in a ``config.json``."""
    return Qwen3_5Config(**qwen3_5_fields(hf))


def qwen3_5_keys(config: Qwen3_5Config, mlp_keys: Any = None) -> tuple[Key, ...]:
    """Checkpoint keys; ``mlp_keys`` as in :func:`~fp4jax.layers.decoder.decoder_keys`."""
    c = config

    def mixer_keys(layer: int, target: str, source: str) -> tuple[Key, ...]:
        if c.layer_types[layer] == LINEAR:
            return gated_delta_net_keys(
                f"{target}/linear_attn",
                f"{source}.linear_attn",
                hidden_size=c.hidden_size,
                sizes=c.delta_net,
            )
        return attention_keys(
            f"{target}/self_attn",
            f"{source}.self_attn",
            hidden_size=c.hidden_size,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            qk_norm=True,
            bias=c.attention_bias,
            gated=c.attn_output_gate,
        )

    return decoder_keys(c, mixer_keys=mixer_keys, mlp_keys=mlp_keys)


ARCHITECTURE = Architecture(
    name="Qwen3_5ForConditionalGeneration",
    other_names=("Qwen3_5ForCausalLM",),
    config=qwen3_5_config,
    model=Qwen3_5,
    keys=qwen3_5_keys,
    skip=NOT_TEXT,
)
