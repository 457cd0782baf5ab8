"""A drafter without a model: what followed the same tokens the last time they came.

Prompt lookup decoding (A. Saxena, 2023): answers that quote, summarize or edit their prompt repeat
pieces of it, and code and lists repeat themselves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from fp4jax.errors import ConfigError
from fp4jax.generation.drafting import Draw, Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenHistory:
    """Tokens that the target has processed; those from ``position`` on mean nothing."""

    tokens: Int32[Array, "batch capacity"]
    position: Int32[Array, " batch"]


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Continues as the longest matching end of the context went on before.

    Of several places that match in as many tokens the last one counts. A continuation that reaches
    the end of the context goes on with what it has proposed itself, so that a repetition of any
    period is proposed whole. Without a match the proposals are the anchor, which costs nothing
    more: the width of a pass is fixed.

    Attributes:
      ngram: most tokens that are compared, at least 1.
      block_size: tokens of one verification pass, at least 2.

    Raises:
      ConfigError: values out of range.
    """

    ngram: int = 3
    block_size: int = 8
    taps: tuple[int, ...] = dataclasses.field(default=(), init=False)

    def __post_init__(self) -> None:
        for name, least in (("ngram", 1), ("block_size", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}")

    def with_block_size(self, block_size: int) -> PromptLookup:
        """The same with blocks of another size."""
        return dataclasses.replace(self, block_size=block_size)

    def check_fits(self, target: Any) -> None:
        """Fits any model."""

    def init_cache(self, batch: int, capacity: int, dtype: Any) -> TokenHistory:
        """See :class:`~fp4jax.generation.drafting.Drafter`."""
        del dtype
        return TokenHistory(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros(batch, jnp.int32))

    def observe(
        self,
        params: Any,
        cache: TokenHistory,
        tokens: Int32[Array, "batch time"],
        taps: tuple[Any, ...],
        lengths: Int32[Array, " batch"],
    ) -> TokenHistory:
        """See :class:`~fp4jax.generation.drafting.Drafter`."""
        del params, taps

        def write(row: Array, new: Array, start: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(row, new, start, axis=0)

        held = jax.vmap(write)(cache.tokens, tokens, cache.position)
        return TokenHistory(held, cache.position + lengths)

    def propose(
        self,
        params: Any,
        target: nn.Module,
        target_params: Any,
        anchor: Int32[Array, " batch"],
        cache: TokenHistory,
        draw: Draw,
    ) -> Proposal:
        """See :class:`~fp4jax.generation.drafting.Drafter`."""
        del params, target, target_params, draw
        return Proposal(jax.vmap(self._continue)(cache.tokens, cache.position, anchor))

    def _continue(
        self, history: Int32[Array, " capacity"], end: Int32[Array, ""], anchor: Int32[Array, ""]
    ) -> Int32[Array, " proposals"]:
        """Proposals of one row, whose token at position ``end`` is the anchor."""
        at = jnp.arange(history.shape[0], dtype=jnp.int32)
        history = jnp.where(at == end, anchor, history)
        # matched[j]: how many tokens up to j equal the context's last ones.
        matched = jnp.zeros_like(at)
        going = at < end
        for back in range(self.ngram):
            earlier = jnp.roll(history, back)  # the token at j - back
            going &= (at >= back) & (earlier == history[jnp.maximum(end - back, 0)])
            matched += going.astype(jnp.int32)
        longest = jnp.max(matched)
        place = jnp.max(jnp.where((matched == longest) & (at < end), at, -1))
        place = jnp.where(longest > 0, place, end - 1)
        ahead = jnp.arange(self.block_size - 1, dtype=jnp.int32) % jnp.maximum(end - place, 1)
        return history[place + 1 + ahead]
