"""DFlash drafters of both generations: block diffusion for speculative decoding.

A few Qwen3 layers that propose a whole block in one pass (arXiv 2602.06036). Context enters as
activations of the target, whose embedding and head the drafter uses too. Names as in
``DFlashDraftModel`` and ``DFlash2DraftModel`` of https://github.com/z-lab/dflash.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

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
from fp4jax.checkpoints.keys import Key, Skip, linear, vector
from fp4jax.errors import ConfigError
from fp4jax.generation.block_drafter import BlockDrafter
from fp4jax.layers.block_attention import BlockAttention, block_attention_keys
from fp4jax.layers.cache import Cache, KVCache
from fp4jax.layers.candidate_selector import (
    CandidateSelector,
    SelectorSizes,
    candidate_selector_keys,
)
from fp4jax.layers.decoder import DecoderConfig
from fp4jax.layers.dynamic_conv import (
    DynamicConvKernels,
    DynamicConvSizes,
    dynamic_conv,
    dynamic_conv_keys,
)
from fp4jax.layers.linear import Linear
from fp4jax.layers.mlp import GatedMLP, gated_mlp_keys
from fp4jax.layers.norms import RMSNorm

ATTENTION_KINDS = ("full_attention", "sliding_attention")
NORMS = ("input_layernorm", "post_attention_layernorm")
CONVS = ("attention_conv", "mlp_conv")
CAP = "final_logit_softcapping"

OF_TARGET = Skip(r"(model\.)?(embed_tokens|lm_head)\..*", "a drafter uses the target's")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConfig(DecoderConfig):
    """Sizes of the layers, and what the drafter adds to them.

    Attributes:
      block_size: the anchor and the tokens proposed after it.
      mask_token_id: stands where a token is to be proposed.
      target_layer_ids: layers of the target whose output is the context.
      num_target_layers: layers of the target; None where the checkpoint does not say.
      windows: of each layer, None where it sees everything.
      causal: of each layer, whether a token of the block sees only those before it.
      input_embedding_scale: multiplies the target's embeddings.
      output_multiplier: multiplies the logits.
      final_logit_softcapping: bound of the logits, by tanh; None for none.
      conv: convolutions around attention and MLP; second generation.
      selector: of candidates; likewise.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    num_target_layers: int | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    conv: DynamicConvSizes | None = None
    selector: SelectorSizes | None = None


class DFlashBlock(nn.Module):
    """Attention, then SwiGLU, each after a norm and, where there are any, between two filters."""

    config: DFlashConfig
    index: int
    quantized: bool = True

    def setup(self):
        c = self.config
        self.input_layernorm = RMSNorm(c.rms_norm_eps)
        self.self_attn = BlockAttention(
            c.hidden_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            c.rope,
            c.rms_norm_eps,
            causal=c.causal[self.index],
            window=c.windows[self.index],
            use_bias=c.attention_bias,
            quantized=self.quantized,
        )
        self.post_attention_layernorm = RMSNorm(c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, False, self.quantized)
        if c.conv is not None:
            self.attention_conv = DynamicConvKernels(c.conv, self.quantized)
            self.mlp_conv = DynamicConvKernels(c.conv, self.quantized)

    def remember(
        self, x: Float[Array, "batch time h"], start: Int32[Array, " batch"], cache: KVCache
    ) -> KVCache:
        """The cache with context ``x``, which no norm of this layer touches."""
        return self.self_attn.remember(x, start, cache)

    def __call__(
        self, x: Float[Array, "batch time h"], start: Int32[Array, " batch"], cache: KVCache
    ) -> Float[Array, "batch time h"]:
        y = self.input_layernorm(x)
        if self.config.conv is None:
            x = x + self.self_attn(y, start, cache)
            return x + self.mlp(self.post_attention_layernorm(x))
        before, after = self.attention_conv(y)
        x = x + dynamic_conv(self.self_attn(dynamic_conv(y, before), start, cache), after)
        y = self.post_attention_layernorm(x)
        before, after = self.mlp_conv(y)
        return x + dynamic_conv(self.mlp(dynamic_conv(y, before)), after)


class DFlash(BlockDrafter):
    """A drafter of either generation."""

    def setup(self):
        c = self.config
        self.fc = Linear(c.hidden_size, quantized=self.quantized)
        self.hidden_norm = RMSNorm(c.rms_norm_eps)
        self.layers = [DFlashBlock(c, i, self.quantized) for i in range(c.num_hidden_layers)]
        self.norm = RMSNorm(c.rms_norm_eps)
        if c.selector is not None:
            self.candidate_selector = CandidateSelector(c.vocab_size, c.selector, self.quantized)

    def remember(
        self,
        taps: tuple[Float[Array, "batch time h"], ...],
        cache: Cache,
        lengths: Int32[Array, " batch"],
    ) -> Cache:
        """The cache with each layer's keys and values of the target's tokens."""
        x = jnp.concatenate([tap.astype(self.dtype) for tap in taps], axis=-1)
        x = self.hidden_norm(self.fc(x))
        layers = (
            layer.remember(x, cache.position, entry)
            for layer, entry in zip(self.layers, cache.layers, strict=True)
        )
        return Cache(cache.position + lengths, tuple(layers))

    def __call__(
        self, embedded: Float[Array, "batch time h"], cache: Cache
    ) -> Float[Array, "batch time h"]:
        """Hidden states of a block, anchor first, for the target's head.

        Args:
          embedded: the target's embeddings of the anchor and of mask tokens.
          cache: what came before the anchor.
        """
        x = embedded.astype(self.dtype)
        if self.config.input_embedding_scale != 1:
            x = x * jnp.asarray(self.config.input_embedding_scale, self.dtype)
        for layer, entry in zip(self.layers, cache.layers, strict=True):
            x = layer(x, cache.position, entry)
        hidden = self.norm(x)
        if self.is_initializing():
            self.remember((x,) * len(self.config.target_layer_ids), cache, cache.position)
            if self.config.selector is not None:
                logits = jnp.zeros((*x.shape[:2], self.config.vocab_size), jnp.float32)
                self.select(hidden, logits, cache.position, lambda _, ids, at: (ids[:, 0], at))
        return hidden

    def select(
        self,
        hidden: Float[Array, "batch time h"],
        logits: Float32[Array, "batch time v"],
        anchor: Int32[Array, " batch"],
        choose: Any,
    ) -> tuple[Int32[Array, "batch time"], Any]:
        """See :class:`~fp4jax.layers.candidate_selector.CandidateSelector`."""
        found: tuple[Array, Any] = self.candidate_selector(hidden, logits, anchor, choose)
        return found


def dflash_config(hf: Mapping[str, Any]) -> DFlashConfig:
    """A first-generation drafter's sizes.

    What concerns drafting is read from ``dflash_config``, else from the top level, where earlier
    checkpoints have some of it.

    Raises:
      ConfigError: a field is missing, has the wrong type, contradicts another, or asks for what
        cannot be served.
    """
    fields = {**decoder_fields(hf), "tie_word_embeddings": False}
    own = _drafting_fields(hf)
    block_size = whole(own, "block_size", 16)
    if block_size < 2:
        raise ConfigError(f"{CONFIG_NAME}: block_size = 1 leaves nothing to propose")
    rotated = {**mapping(hf, "rope_scaling"), **mapping(hf, "rope_parameters"), **hf}
    if rotated.get("partial_rotary_factor", 1) not in (None, 1):
        raise ConfigError(
            f"{CONFIG_NAME}: partial_rotary_factor = {rotated['partial_rotary_factor']!r:.80} is "
            "not supported in a drafter; known: 1"
        )
    sliding = _sliding(hf, fields["num_hidden_layers"])
    window = None
    if any(sliding) and flag(hf, "use_sliding_window", True):
        window = whole(hf, "sliding_window")
    return DFlashConfig(
        **fields,
        block_size=block_size,
        mask_token_id=_mask_token_id(own, fields["vocab_size"]),
        target_layer_ids=_target_layer_ids(own, fields["num_hidden_layers"]),
        num_target_layers=whole(own, "num_target_layers") if "num_target_layers" in own else None,
        windows=tuple(window if slides else None for slides in sliding),
        causal=tuple(flag(own, "is_causal", slides) for slides in sliding),
        input_embedding_scale=real(own, "input_embedding_scale", 1.0),
        output_multiplier=real(own, "output_multiplier", 1.0),
        final_logit_softcapping=real(own, CAP, 1.0) if own.get(CAP) else None,
    )


def dflash2_config(hf: Mapping[str, Any]) -> DFlashConfig:
    """A second-generation drafter's sizes; errors as of :func:`dflash_config`."""
    config, own = dflash_config(hf), _drafting_fields(hf)
    conv = DynamicConvSizes(whole(own, "conv_kernel_size"), whole(own, "conv_group_size"))
    selector = SelectorSizes(whole(own, "selector_rank"), whole(own, "selector_top_k"))
    if config.hidden_size % conv.group:
        raise ConfigError(
            f"{CONFIG_NAME}: hidden_size = {config.hidden_size} is not a multiple of "
            f"conv_group_size = {conv.group}"
        )
    if selector.top_k > config.vocab_size:
        raise ConfigError(
            f"{CONFIG_NAME}: selector_top_k = {selector.top_k} is more than vocab_size = "
            f"{config.vocab_size}"
        )
    return dataclasses.replace(config, conv=conv, selector=selector)


def _drafting_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    stated = {**hf, **{k: v for k, v in mapping(hf, "dflash_config").items() if v is not None}}
    return {name: value for name, value in stated.items() if value is not None}


def _mask_token_id(own: Mapping[str, Any], vocab_size: int) -> int:
    token = own.get("mask_token_id")
    if type(token) is not int or not 0 <= token < vocab_size:
        raise ConfigError(
            f"{CONFIG_NAME}: mask_token_id must be a token id below vocab_size = {vocab_size}, "
            f"found {token!r:.80}"
        )
    return token


def _target_layer_ids(own: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The stated ones; else, as in the first checkpoints, spread over the target's layers."""
    stated = sequence(own, "target_layer_ids", int)
    if not stated:
        if "num_target_layers" not in own:
            raise ConfigError(
                f"{CONFIG_NAME}: 'target_layer_ids' is missing, and so is 'num_target_layers'"
            )
        target = whole(own, "num_target_layers")
        if layers == 1:
            return (target // 2,)
        return tuple(round(1 + i * (target - 4) / (layers - 1)) for i in range(layers))
    if min(stated) < 0:
        raise ConfigError(f"{CONFIG_NAME}: target_layer_ids = {list(stated)} holds a negative one")
    return stated


def _sliding(hf: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    types = sequence(hf, "layer_types", str) or ATTENTION_KINDS[:1] * layers
    if len(types) != layers or not all(kind in ATTENTION_KINDS for kind in types):
        raise ConfigError(
            f"{CONFIG_NAME}: layer_types must be {layers} of {', '.join(ATTENTION_KINDS)}, found "
            f"{list(types)!r:.80}"
        )
    return tuple(kind == ATTENTION_KINDS[1] for kind in types)


def dflash_keys(config: DFlashConfig) -> tuple[Key, ...]:
    """Checkpoint keys."""
    c, h = config, config.hidden_size
    keys: list[Key] = [
        linear("fc", "fc", h, len(c.target_layer_ids) * h),
        vector("hidden_norm", "hidden_norm", h),
        vector("norm", "norm", h),
    ]
    for i in range(c.num_hidden_layers):
        target, source = f"layers_{i}", f"layers.{i}"
        keys += [vector(f"{target}/{name}", f"{source}.{name}", h) for name in NORMS]
        keys += block_attention_keys(
            f"{target}/self_attn",
            f"{source}.self_attn",
            hidden_size=h,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            bias=c.attention_bias,
        )
        keys += gated_mlp_keys(
            f"{target}/mlp",
            f"{source}.mlp",
            hidden_size=h,
            intermediate_size=c.intermediate_size,
        )
        if c.conv is not None:
            for name in CONVS:
                keys += dynamic_conv_keys(
                    f"{target}/{name}", f"{source}.{name}", hidden_size=h, sizes=c.conv
                )
    if c.selector is not None:
        name = "candidate_selector"
        keys += candidate_selector_keys(
            name, name, hidden_size=h, vocab_size=c.vocab_size, sizes=c.selector
        )
    return tuple(keys)


ARCHITECTURE = Architecture(
    name="DFlashDraftModel",
    config=dflash_config,
    model=DFlash,
    keys=dflash_keys,
    skip=(OF_TARGET,),
    drafter=True,
)

SECOND_GENERATION = dataclasses.replace(
    ARCHITECTURE, name="DFlash2DraftModel", config=dflash2_config
)
