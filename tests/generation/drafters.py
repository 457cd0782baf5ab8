"""Drafters whose proposals a test decides."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax.generation.drafting import Proposal
from fp4jax.generation.drafts import Draft


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Proposes what ``params`` says stands at each position of each row; a point mass."""

    block_size: int = 4
    taps: tuple[int, ...] = ()

    def with_block_size(self, block_size):
        return dataclasses.replace(self, block_size=block_size)

    def check_fits(self, target):
        pass

    def init_cache(self, batch, capacity, dtype):
        return jnp.zeros(batch, jnp.int32)

    def observe(self, params, cache, tokens, taps, lengths):
        assert len(taps) == len(self.taps)
        return cache + lengths

    def propose(self, params, target, target_params, anchor, cache, draw):
        at = cache[:, None] + 1 + jnp.arange(self.block_size - 1, dtype=jnp.int32)
        return Proposal(jnp.take_along_axis(params, at, axis=1, mode="clip"))


@dataclasses.dataclass(frozen=True)
class Bigram(Scripted):
    """Draws left to right from the row of ``params``, logits [V, V], of the token before."""

    def propose(self, params, target, target_params, anchor, cache, draw):
        tokens, scores, last = [], [], anchor
        for at in range(self.block_size - 1):
            last, score = draw.one(params[last], at)
            tokens.append(last)
            scores.append(score)
        stacked = None if scores[0] is None else jnp.stack(scores, axis=1)
        return Proposal(jnp.stack(tokens, axis=1), stacked)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Each row's sum of a tap over its tokens, and their number."""

    total: Any
    position: Any


@dataclasses.dataclass(frozen=True)
class Tapped(Scripted):
    """Proposes by the target's head what a matrix makes of the anchor and the taps so far."""

    taps: tuple[int, ...] = (0,)
    hidden: int = 24

    def init_cache(self, batch, capacity, dtype):
        return Sums(jnp.zeros((batch, self.hidden), dtype), jnp.zeros(batch, jnp.int32))

    def observe(self, params, cache, tokens, taps, lengths):
        seen = jnp.arange(tokens.shape[1], dtype=jnp.int32) < lengths[:, None]
        added = jnp.sum(jnp.where(seen[:, :, None], taps[0], 0.0), axis=1)
        return Sums(cache.total + added, cache.position + lengths)

    def propose(self, params, target, target_params, anchor, cache, draw):
        embedded = target.apply({"params": target_params}, anchor, method="embed")
        hidden = (embedded + cache.total) @ params
        logits = target.apply({"params": target_params}, hidden, method="logits")
        count = self.block_size - 1
        return draw.block(jnp.repeat(logits[:, None], count, axis=1))


def scripted(prompts, answers, wrong, vocab: int, block_size: int, taps=()) -> Draft:
    """A drafter that knows ``answers``, but for what ``wrong`` [batch, longest answer] spoils."""
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    table = np.zeros((len(prompts), longest), np.int32)
    for b, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        row = [*prompt, *((t + wrong[b][i]) % vocab for i, t in enumerate(answer))]
        table[b, : len(row)] = row
    return Draft(Scripted(block_size, taps), jnp.asarray(table))


def simulate(wrong, count: int, block_size: int) -> tuple[list[int], list[bool]]:
    """Steps that gave 1, 2, … tokens, and which of ``count`` tokens a scripted drafter gave."""
    histogram, drafted = [0] * block_size, [False]  # the first token follows the prompt
    while len(drafted) < count:
        at, right = len(drafted), 0
        while right < block_size - 1 and at + right < len(wrong) and not wrong[at + right]:
            right += 1
        step = ([True] * right + [False])[: count - at]
        histogram[len(step) - 1] += 1
        drafted += step
    return histogram, drafted
