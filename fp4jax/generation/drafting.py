"""What a drafter is: it proposes a few tokens, which the target then verifies in one pass.

A drafter is a frozen, hashable, static object (a Flax module, a frozen dataclass); its parameters
and its cache are arguments and results. It owns neither embedding nor head: where it needs the
target's, it applies the target's module to the target's tree, both of which it is handed::

    x = target.apply({"params": target_params}, ids, method="embed")  # [..., H]
    logits = target.apply({"params": target_params}, hidden, method="logits")  # f32 [..., V]

Between two passes the target's cache and the drafter's hold the same tokens: all but the anchor,
the token drawn last. A step then is: ``propose`` after the anchor; one pass of the target over
anchor and proposals; ``observe`` of the anchor and the proposals that were accepted.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt32

from fp4jax.generation.samplers import (
    SamplerState,
    SamplingArrays,
    SamplingFeatures,
    draw,
    penalize,
    position_keys,
    shaped,
)

PROPOSING, ACCEPTING, CORRECTING = 1, 2, 3
"""What the key of a position is folded with for each of the draws that it may need."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """Tokens that may follow the anchor.

    Attributes:
      tokens: ids, valid ones in any case.
      scores: unnormalized log-probabilities that each was drawn from, -inf where a token could not
        come; only rows with a temperature need them. None where nothing was drawn at random.
    """

    tokens: Int32[Array, "batch proposals"]
    scores: Float32[Array, "batch proposals vocab"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """How to choose proposals from logits: as the target's own tokens are chosen.

    Greedy rows take the largest logit, the others draw after the same processors as the target's.
    Penalties are those of the context up to the anchor. Any distribution of proposals leaves the
    output's as it is; one like the target's has more of them accepted.

    Attributes:
      sampling: values of the processors, a row each.
      state: penalty counts.
      index: tokens that each row has generated so far, which is the index of its first proposal.
      features: static.
    """

    sampling: SamplingArrays
    state: SamplerState
    index: Int32[Array, " batch"]
    features: SamplingFeatures = dataclasses.field(metadata={"static": True})

    def one(
        self, logits: Float32[Array, "batch vocab"], at: int | Int32[Array, ""]
    ) -> tuple[Int32[Array, " batch"], Float32[Array, "batch vocab"] | None]:
        """Chooses proposal ``at`` (0 follows the anchor) of each row, for drafts that go in order.

        Args:
          logits: -inf where a token is no candidate.
          at: index in the block; may be traced.

        Returns:
          Ids, and the scores for :class:`Proposal`, None where every row is greedy.
        """
        scores = penalize(logits, self.sampling, self.state, self.features)
        tokens = lax.argmax(scores, 1, jnp.int32)
        if not self.features.stochastic:
            return tokens, None
        scores = shaped(scores, self.sampling, self.features)
        keys = purpose_keys(self.sampling.seed, self.index + jnp.int32(at), PROPOSING)
        return jnp.where(self.sampling.temp > 0, draw(scores, keys), tokens), scores

    def block(self, logits: Float32[Array, "batch proposals vocab"]) -> Proposal:
        """Chooses every proposal from its own logits, for drafts that come all at once."""
        count = jnp.arange(logits.shape[1], dtype=jnp.int32)
        tokens, scores = jax.vmap(self.one, in_axes=(1, 0), out_axes=(1, 1))(logits, count)
        return Proposal(tokens, scores)


@runtime_checkable
class Drafter(Protocol):
    """A static object that proposes tokens. Methods of a Flax module are ``@nn.nowrap`` ones."""

    @property
    def block_size(self) -> int:
        """Tokens of one verification pass, at least 2: the anchor and the proposals."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Activations of the target that ``observe`` reads: i is the input of layer i.

        What leaves layer ``i`` is tap ``i + 1``; the number of layers is what leaves the last one,
        before the final norm.
        """
        ...

    def with_block_size(self, block_size: int) -> Drafter:
        """The same drafter with blocks of another size.

        Raises:
          ConfigError: a size that it cannot serve.
        """
        ...

    def check_fits(self, target: Any) -> None:
        """Checks that it can draft for ``target``, a loaded model.

        Raises:
          ConfigError: it cannot; names both sizes (vocabulary, hidden size, layers).
        """
        ...

    def init_cache(self, batch: int, capacity: int, dtype: Any) -> Any:
        """An empty cache, a pytree.

        Args:
          batch: rows.
          capacity: tokens that a row can hold; a block after the last one included.
          dtype: of the target's activations.
        """
        ...

    def observe(
        self,
        params: Any,
        cache: Any,
        tokens: Int32[Array, "batch time"],
        taps: tuple[Float[Array, "batch time h"], ...],
        lengths: Int32[Array, " batch"],
    ) -> Any:
        """The cache with tokens that the target has processed, accepted ones only.

        Args:
          params: the drafter's tree.
          cache: each row's own number of tokens.
          tokens: right-padded.
          taps: the target's activations for them, in the order of :attr:`taps`.
          lengths: valid tokens of each row, 0 to time.
        """
        ...

    def propose(
        self,
        params: Any,
        target: nn.Module,
        target_params: Any,
        anchor: Int32[Array, " batch"],
        cache: Any,
        draw: Draw,
    ) -> Proposal:
        """``block_size - 1`` tokens that may follow ``anchor``; the cache stays as it is.

        Args:
          params: the drafter's tree.
          target: the target's module, static: for its embedding and head.
          target_params: the target's tree.
          anchor: each row's last token, which the cache does not hold.
          cache: everything before the anchor.
          draw: chooses tokens from logits.
        """
        ...


def purpose_keys(
    seed: UInt32[Array, " batch"], index: Int32[Array, " batch"], purpose: int
) -> Array:
    """One key a row for one of the draws that its token number ``index`` may need.

    A position is settled once, and nothing drawn for a proposal that was not reached has any
    bearing on the output, so each key has its say once, however the blocks fall.
    """
    return jax.vmap(lambda key: jax.random.fold_in(key, purpose))(position_keys(seed, index))
