"""Choosing a drafted block token by token among each position's likeliest candidates.

A block's logits come all at once, so none knows what the tokens before it turned out to be. The
selector adds that: a low-rank term for each pair of a token and its successor
(https://github.com/z-lab/dflash, second generation).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from fp4jax.checkpoints.keys import Key, linear, parameter
from fp4jax.layers import weights
from fp4jax.layers.linear import Linear

CODEBOOKS = ("predecessor_codebook", "successor_codebook")

Choose = Callable[[Array, Array, Array], tuple[Array, Any]]
"""``(scores [B, k], candidates [B, k], position) -> (tokens [B], anything to keep)``."""


@dataclasses.dataclass(frozen=True)
class SelectorSizes:
    """What a :class:`CandidateSelector` is made of.

    Attributes:
      rank: of the term for a token and its successor.
      top_k: candidates at each position.
    """

    rank: int
    top_k: int


class CandidateSelector(nn.Module):
    """``score(c) = logit(c) + Σ predecessor[previous] · projection(hidden) · successor[c]``.

    Parameters: ``predecessor_codebook`` and ``successor_codebook`` [V, rank], and
    ``hidden_projection`` from H to rank. Computed in f32.
    """

    vocab_size: int
    sizes: SelectorSizes
    quantized: bool = True

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "batch time h"],
        logits: Float32[Array, "batch time v"],
        anchor: Int32[Array, " batch"],
        choose: Choose,
    ) -> tuple[Int32[Array, "batch time"], Any]:
        """Walks the block from left to right.

        Args:
          hidden: what the logits were made of.
          logits: of each position.
          anchor: the token before the first position.
          choose: picks a candidate at each position; traced once.

        Returns:
          The tokens, and what ``choose`` gave beside them, stacked on axis 1.
        """
        predecessors, successors = (
            weights.variable(self, name, self._fresh(hidden.dtype)) for name in CODEBOOKS
        )
        project = Linear(self.sizes.rank, quantized=self.quantized, name="hidden_projection")
        weight = project(hidden, jnp.float32)
        unary, candidates = lax.top_k(logits, self.sizes.top_k)

        def step(previous: Array, item: tuple[Array, ...]) -> tuple[Array, tuple[Array, Any]]:
            w, scores, ids, position = item
            w = w * _rows(predecessors, previous)
            pairs = jnp.einsum(
                "br,bkr->bk", w, _rows(successors, ids), precision=lax.Precision.HIGHEST
            )
            token, kept = choose(scores + pairs, ids, position)
            return token, (token, kept)

        items = (*(jnp.moveaxis(x, 1, 0) for x in (weight, unary, candidates)),)
        positions = jnp.arange(hidden.shape[1], dtype=jnp.int32)
        _, found = lax.scan(step, anchor, (*items, positions))
        tokens, kept = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), found)
        return tokens, kept

    @nn.nowrap
    def _fresh(self, dtype: jnp.dtype) -> Callable[[Array], Array]:
        return lambda key: weights.random_dense(key, self.vocab_size, self.sizes.rank, dtype)


def _rows(codebook: Any, ids: Int32[Array, "*batch"]) -> Float32[Array, "*batch rank"]:
    return weights.embed(codebook, ids, jnp.dtype(jnp.float32))


def candidate_selector_keys(
    target: str, source: str, *, hidden_size: int, vocab_size: int, sizes: SelectorSizes
) -> tuple[Key, ...]:
    """Checkpoint keys of a :class:`CandidateSelector` at tree path ``target``."""
    projection = "hidden_projection"
    return (
        *(
            parameter(f"{target}/{name}", f"{source}.{name}", vocab_size, sizes.rank)
            for name in CODEBOOKS
        ),
        linear(f"{target}/{projection}", f"{source}.{projection}", sizes.rank, hidden_size),
    )
