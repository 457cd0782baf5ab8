"""The target's side of a drafter that proposes a block in one pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from fp4jax.errors import ConfigError
from fp4jax.generation.drafting import Draw, Proposal
from fp4jax.generation.samplers import SamplingFeatures
from fp4jax.layers.cache import Cache, KVCache


class BlockDrafter(nn.Module):
    """A :class:`~fp4jax.generation.drafting.Drafter` that is a Flax module of its own.

    A model has ``__call__(embedded, cache)``, hidden states of a block;
    ``remember(taps, cache, lengths)``, the cache with more context; and, where its config has a
    ``selector``, ``select(hidden, logits, anchor, choose)``. Embedding and head are the target's.

    Attributes:
      config: sizes, frozen.
      dtype: of activations.
      quantized: whether ``init`` makes NVFP4 weights.
    """

    config: Any
    dtype: jnp.dtype = jnp.dtype(jnp.float32)
    quantized: bool = True

    @property
    def block_size(self) -> int:
        """Tokens of one verification pass."""
        return self.config.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        """Activations of the target that are its context."""
        return tuple(layer + 1 for layer in self.config.target_layer_ids)

    @nn.nowrap
    def with_block_size(self, block_size: int) -> BlockDrafter:
        """The same drafter with blocks of another size; those it was trained with serve best.

        Raises:
          ConfigError: less than 2.
        """
        if block_size < 2:
            raise ConfigError(f"block_size = {block_size}: a block is the anchor and a proposal")
        return self.clone(config=dataclasses.replace(self.config, block_size=block_size))

    @nn.nowrap
    def check_fits(self, target: Any) -> None:
        """Checks that the drafter was made for a model of ``target``'s sizes.

        Raises:
          ConfigError: it was not; both sizes are named.
        """
        c, t = self.config, target.config
        for name in ("vocab_size", "hidden_size"):
            own, other = getattr(c, name), getattr(t, name)
            if own != other:
                raise ConfigError(f"the drafter's {name} is {own}, but the target's is {other}")
        layers = t.num_hidden_layers
        if c.num_target_layers not in (None, layers):
            raise ConfigError(
                f"the drafter was made for num_target_layers = {c.num_target_layers}, but the "
                f"target's num_hidden_layers is {layers}"
            )
        if max(c.target_layer_ids) > layers - 2:
            raise ConfigError(
                f"the drafter's target_layer_ids are {list(c.target_layer_ids)}, but the target's "
                f"num_hidden_layers is {layers}: the last that can be read is {layers - 2}"
            )

    @nn.nowrap
    def init_cache(self, batch: int, capacity: int, dtype: Any) -> Cache:
        """An empty cache."""
        c = self.config
        layers = (
            KVCache.zeros(batch, capacity, c.num_key_value_heads, c.head_dim, jnp.dtype(dtype))
            for _ in range(c.num_hidden_layers)
        )
        return Cache(jnp.zeros(batch, jnp.int32), tuple(layers))

    @nn.nowrap
    def observe(
        self,
        params: Any,
        cache: Cache,
        tokens: Int32[Array, "batch time"],
        taps: tuple[Float[Array, "batch time h"], ...],
        lengths: Int32[Array, " batch"],
    ) -> Cache:
        """The cache with tokens that the target has processed."""
        del tokens
        after: Any = self.apply({"params": params}, taps, cache, lengths, method="remember")
        return after

    @nn.nowrap
    def hidden_states(
        self,
        params: Any,
        target: nn.Module,
        target_params: Any,
        anchor: Int32[Array, " batch"],
        cache: Cache,
    ) -> Float[Array, "batch proposals h"]:
        """What the mask tokens after ``anchor`` become."""
        masks = jnp.full((anchor.shape[0], self.block_size - 1), self.config.mask_token_id)
        block = jnp.concatenate([anchor[:, None], masks.astype(jnp.int32)], axis=1)
        embedded: Any = target.apply({"params": target_params}, block, method="embed")
        hidden: Any = self.apply({"params": params}, embedded, cache)
        return hidden[:, 1:]

    @nn.nowrap
    def logits(
        self, target: Any, target_params: Any, hidden: Float[Array, "*batch h"]
    ) -> Float32[Array, "*batch v"]:
        """f32 logits by the target's head, scaled and capped as the drafter has it."""
        hidden = hidden.astype(target.dtype)
        logits: Any = target.apply({"params": target_params}, hidden, method="logits")
        logits = logits * jnp.float32(self.config.output_multiplier)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else jnp.tanh(logits / jnp.float32(cap)) * jnp.float32(cap)

    @nn.nowrap
    def propose(
        self,
        params: Any,
        target: nn.Module,
        target_params: Any,
        anchor: Int32[Array, " batch"],
        cache: Cache,
        draw: Draw,
    ) -> Proposal:
        """The rest of the block after ``anchor``: all at once, or candidate by candidate."""
        hidden = self.hidden_states(params, target, target_params, anchor, cache)
        logits = self.logits(target, target_params, hidden)
        if self.config.selector is None:
            return draw.block(logits)
        rows = jnp.arange(anchor.shape[0], dtype=jnp.int32)

        def choose(scores: Array, ids: Array, at: Array) -> tuple[Array, Array | None]:
            if draw.features == SamplingFeatures(top_logprobs=draw.features.top_logprobs):
                return ids[rows, jnp.argmax(scores, axis=1)], None  # greedy, nothing adjusted
            nothing = jnp.full((ids.shape[0], self.config.vocab_size), -jnp.inf, jnp.float32)
            return draw.one(nothing.at[rows[:, None], ids].set(scores), at)

        found: Any = self.apply({"params": params}, hidden, logits, anchor, choose, method="select")
        return Proposal(*found)
