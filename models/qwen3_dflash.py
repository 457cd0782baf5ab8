"""DFlash drafters of both generations: block diffusion for speculative decoding.

A few Qwen3 layers that propose a whole block in one pass (arXiv 2602.06036). Context enters as
activations of the target, whose embedding and head the drafter uses too. Names as in
``DFlashDraftModel`` and ``DFlash2DraftModel`` of https://github.com/z-lab/dflash.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from fp4jax.architecture import Architecture
from fp4jax.checkpoints.dflash_config import DFlashConfig, dflash2_config, dflash_config
from fp4jax.checkpoints.keys import Key, Skip, linear, vector
from fp4jax.generation.block_drafter import BlockDrafter
from fp4jax.layers.block_attention import BlockAttention, block_attention_keys
from fp4jax.layers.cache import Cache, KVCache
from fp4jax.layers.candidate_selector import CandidateSelector, candidate_selector_keys
from fp4jax.layers.dynamic_conv import DynamicConvKernels, dynamic_conv, dynamic_conv_keys
from fp4jax.layers.linear import Linear
from fp4jax.layers.mlp import GatedMLP, gated_mlp_keys
from fp4jax.layers.norms import RMSNorm

NORMS = ("input_layernorm", "post_attention_layernorm")
CONVS = ("attention_conv", "mlp_conv")

OF_TARGET = Skip(r"(model\.)?(embed_tokens|lm_head)\..*", "a drafter uses the target's")


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
                self.select(hidden, logits, cache.position, lambda _, ids, at: (ids[:, 0], None))
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
