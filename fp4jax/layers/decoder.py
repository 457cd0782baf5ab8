"""The frame that decoder-only models share: embedding, blocks, final norm, head."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from fp4jax.checkpoints.keys import Key, head, linear, vector
from fp4jax.layers.attention import Attention, attention_keys
from fp4jax.layers.cache import Cache, KVCache, check_entries
from fp4jax.layers.embedding import Embedding
from fp4jax.layers.linear import Linear
from fp4jax.layers.mlp import GatedMLP, gated_mlp_keys
from fp4jax.layers.norms import RMSNorm
from fp4jax.layers.rope import RopeConfig


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder-only transformer. Field names are Hugging Face's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderOutput:
    """What one pass gives.

    Attributes:
      hidden: after the final norm; :meth:`DecoderModel.logits` takes it.
      cache: the advanced cache, None where none was given.
      taps: activations asked for, in the order asked.
    """

    hidden: Float[Array, "batch time h"]
    cache: Cache | None
    taps: tuple[Float[Array, "batch time h"], ...] = ()


class DecoderBlock(nn.Module):
    """Pre-norm residual block: ``x += mixer(norm(x))``, then ``x += feed_forward(norm(x))``.

    A model overrides :meth:`mixer`, :meth:`feed_forward`, :meth:`new_norm`. A mixer is called with
    ``(x, positions, cache, lengths)`` and returns ``(y, cache)``; ``lengths`` are the valid tokens
    of each row (None: all), which a mixer with a running state must not look past.
    """

    config: Any
    index: int
    quantized: bool = True

    def setup(self):
        self.input_layernorm = self.new_norm()
        setattr(self, self.mixer_name(), self.mixer())
        self.post_attention_layernorm = self.new_norm()
        self.mlp = self.feed_forward()

    @nn.nowrap
    def mixer_name(self) -> str:
        """What the mixer is called in the tree."""
        return "self_attn"

    def new_norm(self) -> nn.Module:
        """A norm of the residual stream; default: RMSNorm."""
        return RMSNorm(self.config.rms_norm_eps)

    def mixer(self) -> nn.Module:
        """The layer that mixes tokens; default: attention."""
        c = self.config
        return Attention(
            c.hidden_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            c.rope,
            use_bias=c.attention_bias,
            quantized=self.quantized,
        )

    def feed_forward(self) -> nn.Module:
        """The layer that acts on each token; default: SwiGLU."""
        c = self.config
        return GatedMLP(c.hidden_size, c.intermediate_size, c.mlp_bias, self.quantized)

    def __call__(
        self,
        x: Float[Array, "batch time h"],
        positions: Int[Array, "batch time"],
        cache: Any,
        lengths: Int32[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch time h"], Any]:
        mixer = getattr(self, self.mixer_name())
        y, cache = mixer(self.input_layernorm(x), positions, cache, lengths)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class DecoderModel(nn.Module):
    """A decoder-only language model. Hashable and static under ``jit``; holds no array.

    A model overrides :meth:`block`, :meth:`new_norm` where its last norm is not the usual one, and
    :meth:`block_cache` where its cache is not a :class:`~fp4jax.layers.cache.KVCache`.

    Attributes:
      config: sizes, frozen.
      dtype: of activations.
      quantized: whether ``init`` makes NVFP4 weights in the blocks.
    """

    config: Any
    dtype: jnp.dtype = jnp.dtype(jnp.float32)
    quantized: bool = True

    def setup(self):
        c = self.config
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, self.dtype)
        self.layers = [self.block(i) for i in range(c.num_hidden_layers)]
        self.norm = self.new_norm()
        if not c.tie_word_embeddings:
            self.lm_head = Linear(c.vocab_size, quantized=False)

    def block(self, index: int) -> nn.Module:
        """Layer ``index``."""
        return DecoderBlock(self.config, index, self.quantized)

    def new_norm(self) -> nn.Module:
        """The norm after the last layer; default: RMSNorm."""
        return RMSNorm(self.config.rms_norm_eps)

    @nn.nowrap
    def block_cache(self, index: int, batch: int, capacity: int, dtype: jnp.dtype) -> Any:
        """An empty cache of layer ``index``."""
        del index
        c = self.config
        return KVCache.zeros(batch, capacity, c.num_key_value_heads, c.head_dim, dtype)

    @nn.nowrap
    def init_cache(self, batch: int, capacity: int, dtype: jnp.dtype | None = None) -> Cache:
        """An empty cache.

        Args:
          batch: rows.
          capacity: tokens that a row can hold.
          dtype: of keys and values; the model's by default.
        """
        layers = (
            self.block_cache(i, batch, capacity, jnp.dtype(dtype or self.dtype))
            for i in range(self.config.num_hidden_layers)
        )
        return Cache(jnp.zeros(batch, jnp.int32), tuple(layers))

    def __call__(
        self,
        tokens: Int32[Array, "batch time"],
        cache: Cache | None = None,
        lengths: Int32[Array, " batch"] | None = None,
        taps: tuple[int, ...] = (),
    ) -> DecoderOutput:
        """Runs the blocks over ``tokens``.

        Args:
          tokens: ids, right-padded.
          cache: continued from, and returned advanced; None takes ``tokens`` for the whole context.
          lengths: valid tokens a row; default all. Padding never changes what a valid token gets.
          taps: static; i asks for the input of layer i, the number of layers for what leaves the
            last one, before the final norm (drafters read them).

        Raises:
          EngineMismatchError: the cache is laid out for another model.
        """
        if cache is not None:
            self._check_cache(cache, tokens.shape[0])
        start = jnp.zeros(tokens.shape[0], jnp.int32) if cache is None else cache.position
        positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        x = self.embed_tokens(tokens)
        caches, seen = [], []
        for i, layer in enumerate(self.layers):
            seen.append(x)
            before = None if cache is None else cache.layers[i]
            x, layer_cache = layer(x, positions, before, lengths)
            caches.append(layer_cache)
        seen.append(x)
        hidden = self.norm(x)
        if self.is_initializing():
            self.logits(hidden)
        after = None
        if cache is not None:
            ahead = tokens.shape[1] if lengths is None else lengths
            after = Cache(cache.position + ahead, tuple(caches))
        return DecoderOutput(hidden, after, tuple(seen[i] for i in taps))

    @nn.nowrap
    def _check_cache(self, cache: Cache, batch: int) -> None:
        slots = [entry.keys.shape[1] for entry in cache.layers if isinstance(entry, KVCache)]
        wanted: Any = jax.eval_shape(lambda: self.init_cache(batch, slots[0] if slots else 1))
        check_entries(type(self).__name__, cache, wanted)

    def embed(self, tokens: Int32[Array, "*batch"]) -> Float[Array, "*batch h"]:
        """Rows of the embedding table, for a drafter that has none of its own."""
        return self.embed_tokens(tokens)

    def logits(self, hidden: Float[Array, "*batch h"]) -> Float32[Array, "*batch v"]:
        """f32 logits over the vocabulary, by the head or by the tied embedding."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens.attend(hidden)
        return self.lm_head(hidden, jnp.float32)


def decoder_keys(
    config: DecoderConfig, *, qk_norm: bool = False, mixer_keys: Any = None, mlp_keys: Any = None
) -> tuple[Key, ...]:
    """Checkpoint keys of a :class:`DecoderModel` with :class:`DecoderBlock` layers.

    Args:
      config: sizes.
      qk_norm: whether q and k are normed.
      mixer_keys: ``(layer, target, source) -> keys`` of a layer's mixer, from the paths of the
        layer; default attention.
      mlp_keys: ``(layer, target, source) -> keys`` of a layer's feed-forward part, from its own
        paths; default SwiGLU.
    """
    h = config.hidden_size

    def self_attention(layer: int, target: str, source: str) -> tuple[Key, ...]:
        del layer
        return attention_keys(
            f"{target}/self_attn",
            f"{source}.self_attn",
            hidden_size=h,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            qk_norm=qk_norm,
            bias=config.attention_bias,
        )

    def swiglu(layer: int, target: str, source: str) -> tuple[Key, ...]:
        del layer
        return gated_mlp_keys(
            target,
            source,
            hidden_size=h,
            intermediate_size=config.intermediate_size,
            bias=config.mlp_bias,
        )

    keys: list[Key] = [linear("embed_tokens", "model.embed_tokens", config.vocab_size, h)]
    for i in range(config.num_hidden_layers):
        target, source = f"layers_{i}", f"model.layers.{i}"
        keys += [
            vector(f"{target}/{name}", f"{source}.{name}", h)
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        keys += (mixer_keys or self_attention)(i, target, source)
        keys += (mlp_keys or swiglu)(i, f"{target}/mlp", f"{source}.mlp")
    keys += [vector("norm", "model.norm", h), head("lm_head", "lm_head", config.vocab_size, h)]
    return tuple(keys)
