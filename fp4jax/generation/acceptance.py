"""Which proposals stand, and the target's own token after them: the output stays the target's.

Greedy rows keep proposals as long as they are what the target would have taken. Rows with a
temperature keep proposal x with probability min(1, p(x) / q(x)), with p the target's distribution
after all its processors and q what x was drawn from; the first one refused is replaced by a draw
from max(p - q, 0), normalized, and after a block that stands whole comes a draw from p (speculative
sampling: arXiv 2211.17192, 2302.01318). A drafter that drew nothing at random has q(x) = 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from fp4jax.generation.drafting import ACCEPTING, CORRECTING, Proposal, purpose_keys
from fp4jax.generation.samplers import (
    SamplerState,
    SamplingArrays,
    SamplingFeatures,
    draw,
    penalize,
    remember,
    shaped,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a verification pass settles; entries after ``accepted[b]`` mean nothing.

    Attributes:
      tokens: the accepted proposals, then one token of the target's own.
      accepted: proposals that stand, 0 to block - 1.
      logprobs: natural log of the model's own probability of each token.
      top_tokens: likeliest alternatives, best first.
      top_logprobs: their logs.
      valid: the position's logits were usable, as in :class:`~fp4jax.generation.samplers.Sample`;
        nothing stands from the first on that were not.
    """

    tokens: Int32[Array, "batch block"]
    accepted: Int32[Array, " batch"]
    logprobs: Float32[Array, "batch block"]
    top_tokens: Int32[Array, "batch block top"]
    top_logprobs: Float32[Array, "batch block top"]
    valid: Bool[Array, "batch block"]


def verify(
    logits: Float32[Array, "batch block vocab"],
    proposal: Proposal,
    sampling: SamplingArrays,
    state: SamplerState,
    index: Int32[Array, " batch"],
    features: SamplingFeatures,
) -> Verdict:
    """Judges a block.

    Args:
      logits: the target's, after the anchor and after each proposal.
      proposal: what followed the anchor.
      sampling: values of the processors, a row each.
      state: penalty counts up to the anchor.
      index: number of the first proposal among the row's generated tokens.
      features: static.
    """
    proposed = proposal.tokens
    scores = _penalized(logits, proposed, sampling, state, features)
    valid = jnp.isfinite(jnp.max(scores, axis=-1))
    best = lax.argmax(scores, 2, jnp.int32)
    stands = proposed == best[:, :-1]
    warm = sampling.temp > 0
    if features.stochastic:
        shape = jax.vmap(lambda one: shaped(one, sampling, features), 1, 1)
        target = jax.nn.softmax(shape(scores), axis=-1)
        draft = _draft_probabilities(proposal, target.shape[2])
        ratio = _odds(sampling, index, proposed.shape[1]) * _of(draft, proposed)
        stands = jnp.where(warm[:, None], ratio < _of(target[:, :-1], proposed), stands)
    stands &= valid[:, :-1]
    accepted = jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    own = _at(best, accepted)
    if features.stochastic:
        last = jnp.zeros_like(target[:, :1])  # nothing was proposed after the last proposal
        drawn = draw(
            jnp.log(_residual(_at(target, accepted), _at(jnp.append(draft, last, 1), accepted))),
            purpose_keys(sampling.seed, index + accepted, CORRECTING),
        )
        own = jnp.where(warm, drawn, own)
    at = jnp.arange(logits.shape[1], dtype=jnp.int32)
    tokens = jnp.where(at < accepted[:, None], _padded(proposed), own[:, None])
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top_logprobs, top_tokens = lax.top_k(logprobs, features.top_logprobs)
    return Verdict(
        tokens=tokens,
        accepted=accepted,
        logprobs=_of(logprobs, tokens),
        top_tokens=top_tokens.astype(jnp.int32),
        top_logprobs=top_logprobs,
        valid=valid,
    )


def _penalized(
    logits: Float32[Array, "batch block vocab"],
    proposed: Int32[Array, "batch proposals"],
    sampling: SamplingArrays,
    state: SamplerState,
    features: SamplingFeatures,
) -> Float32[Array, "batch block vocab"]:
    """Logits with bias and penalties, each position's counts including the proposals before it."""
    if not (features.repetition or features.occurrence):
        return jax.vmap(lambda one: penalize(one, sampling, state, features), 1, 1)(logits)

    def step(state: SamplerState, item: tuple[Array, Array]) -> tuple[SamplerState, Array]:
        one, token = item
        scores = penalize(one, sampling, state, features)
        return remember(state, token, sampling, features), scores

    _, scores = lax.scan(step, state, (logits.swapaxes(0, 1), _padded(proposed).T))
    return scores.swapaxes(0, 1)


def _draft_probabilities(proposal: Proposal, vocab: int) -> Float32[Array, "batch proposals vocab"]:
    """What each proposal was drawn from; where scores are NaN, its token came by no chance."""
    certain = jax.nn.one_hot(proposal.tokens, vocab, dtype=jnp.float32)
    if proposal.scores is None:
        return certain
    q = jax.nn.softmax(proposal.scores, axis=-1)
    return jnp.where(jnp.any(jnp.isnan(q), axis=-1, keepdims=True), certain, q)


def _odds(
    sampling: SamplingArrays, index: Int32[Array, " batch"], count: int
) -> Float32[Array, "batch proposals"]:
    """A uniform number in [0, 1) a proposal."""

    def one(at: Array) -> Array:
        keys = purpose_keys(sampling.seed, index + at, ACCEPTING)
        return jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys)

    return jax.vmap(one, out_axes=1)(jnp.arange(count, dtype=jnp.int32))


def _residual(
    target: Float32[Array, "batch vocab"], draft: Float32[Array, "batch vocab"]
) -> Float32[Array, "batch vocab"]:
    """What the target has beyond the draft; not normalized. The target's own where that is none."""
    beyond = jnp.maximum(target - draft, 0.0)
    return jnp.where(jnp.sum(beyond, axis=-1, keepdims=True) > 0, beyond, target)


def _padded(proposed: Int32[Array, "batch proposals"]) -> Int32[Array, "batch block"]:
    """Proposals with an id at the end that is never used."""
    return jnp.pad(proposed, ((0, 0), (0, 1)))


def _of(values: Float32[Array, "batch n vocab"], tokens: Int32[Array, "batch n"]) -> Any:
    """The value of each token."""
    return jnp.take_along_axis(values, tokens[:, :, None], axis=2)[:, :, 0]


def _at(values: Any, index: Int32[Array, " batch"]) -> Any:
    """Entry ``index[b]`` of row b."""
    where = index.reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, where, axis=1)[:, 0]
