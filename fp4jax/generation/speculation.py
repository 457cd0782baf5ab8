"""Decoding with a drafter: the pure functions, beside those of :mod:`fp4jax.generation.loop`.

Each step proposes ``block_size - 1`` tokens a row, runs the target once over the anchor and the
proposals, keeps of each row what :mod:`fp4jax.generation.acceptance` lets stand, and takes the
rest back: keys and values by position, recurrent states by going again from the state before,
with inputs that the pass left in the cache (:meth:`fp4jax.layers.cache.Cache.commit`).

Besides what ``loop`` asks of ``module``, its cache has ``on_trial()`` and ``commit(position,
lengths)``, and a call with ``taps`` returns ``.taps``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from fp4jax.generation import loop
from fp4jax.generation.acceptance import verify
from fp4jax.generation.drafting import Drafter, Draw
from fp4jax.generation.samplers import SamplerState, SamplingArrays, SamplingFeatures, remember
from fp4jax.generation.state import Limits, LoopState, Output, record_block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeculativeState:
    """All that such a generation carries from step to step; donate it.

    Attributes:
      target: as in plain decoding; ``last`` is the anchor.
      draft: the drafter's cache, which holds the same tokens as the target's.
      accepted: entry i counts the steps that gave a row i + 1 tokens.
    """

    target: LoopState
    draft: Any
    accepted: Int32[Array, "batch block"]

    @classmethod
    def of(cls, target: LoopState, draft: Any, block_size: int) -> SpeculativeState:
        """Before the first step."""
        batch = target.last.shape[0]
        return cls(target, draft, jnp.zeros((batch, block_size), jnp.int32))


def observed_prefill_chunk(
    module: nn.Module,
    params: Any,
    drafter: Drafter,
    draft_params: Any,
    tokens: Int32[Array, "batch time"],
    lengths: Int32[Array, " batch"],
    caches: tuple[Any, Any],
) -> tuple[Float[Array, "batch h"], tuple[Any, Any]]:
    """:func:`fp4jax.generation.loop.prefill_chunk`, which the drafter observes.

    Args:
      module: static.
      params: its tree.
      drafter: static.
      draft_params: its tree.
      tokens: right-padded.
      lengths: valid tokens a row.
      caches: the target's and the drafter's.

    Returns:
      The hidden state of each row's last token here, and both caches.
    """
    cache, draft = caches
    out = _forward(module, params, tokens, cache, lengths, drafter.taps)
    draft = drafter.observe(draft_params, draft, tokens, out.taps, lengths)
    at = jnp.maximum(lengths - 1, 0)[:, None, None]
    return jnp.take_along_axis(out.hidden, at, axis=1)[:, 0], (out.cache, draft)


def speculative_step(
    module: nn.Module,
    params: Any,
    drafter: Drafter,
    draft_params: Any,
    state: SpeculativeState,
    sampling: SamplingArrays,
    limits: Limits,
    *,
    features: SamplingFeatures,
) -> SpeculativeState:
    """One pass of the drafter and one of the target; 1 to ``block_size`` tokens a row.

    Rows that have ended are left as they are. Arguments as in :func:`run_speculation`.
    """
    before = state.target
    draw = Draw(sampling, before.sampler, before.output.count, features)
    proposal = drafter.propose(draft_params, module, params, before.last, state.draft, draw)
    tokens = jnp.concatenate([before.last[:, None], proposal.tokens], axis=1)
    out = _forward(module, params, tokens, before.cache.on_trial(), None, drafter.taps)
    logits: Any = module.apply({"params": params}, out.hidden, method="logits")
    verdict = verify(logits, proposal, sampling, before.sampler, before.output.count, features)
    output, taken = record_block(before.output, verdict, limits)
    final = jnp.take_along_axis(verdict.tokens, jnp.maximum(taken - 1, 0)[:, None], axis=1)[:, 0]
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    target = LoopState(
        cache=out.cache.commit(before.cache.position, taken),
        last=jnp.where(taken > 0, final, before.last),
        sampler=_remember_block(before.sampler, verdict.tokens, taken, sampling, features),
        output=output,
    )
    return SpeculativeState(
        target=target,
        draft=drafter.observe(draft_params, state.draft, tokens, out.taps, taken),
        accepted=state.accepted.at[rows, jnp.maximum(taken - 1, 0)].add(
            (taken > 0).astype(jnp.int32)
        ),
    )


def run_speculation(
    module: nn.Module,
    params: Any,
    drafter: Drafter,
    draft_params: Any,
    state: SpeculativeState,
    sampling: SamplingArrays,
    limits: Limits,
    steps: Int32[Array, ""],
    stopped: Bool[Array, " batch"],
    *,
    features: SamplingFeatures,
) -> SpeculativeState:
    """Up to ``steps`` steps, fewer where every row has ended; one ``lax.while_loop``.

    Args:
      module: static.
      params: its tree.
      drafter: static.
      draft_params: its tree.
      state: before the first step, or from an earlier call.
      sampling: values, a row each.
      limits: likewise.
      steps: a value, so that one compiled function serves a whole answer and a single step of it.
      stopped: rows to end now (the caller saw a stop string).
      features: static.
    """
    output = state.target.output
    output = dataclasses.replace(output, finished=output.finished | stopped)
    state = dataclasses.replace(state, target=dataclasses.replace(state.target, output=output))

    def more(carry: tuple[Array, SpeculativeState]) -> Bool[Array, ""]:
        done, state = carry
        return (done < steps) & ~jnp.all(state.target.output.finished)

    def body(carry: tuple[Array, SpeculativeState]) -> tuple[Array, SpeculativeState]:
        done, state = carry
        state = speculative_step(
            module, params, drafter, draft_params, state, sampling, limits, features=features
        )
        return done + 1, state

    return lax.while_loop(more, body, (jnp.zeros((), jnp.int32), state))[1]


def complete_with_draft(
    module: nn.Module,
    params: Any,
    drafter: Drafter,
    draft_params: Any,
    tokens: Int32[Array, "batch time"],
    lengths: Int32[Array, " batch"],
    sampling: SamplingArrays,
    limits: Limits,
    *,
    features: SamplingFeatures,
    capacity: int,
    size: int,
    dtype: Any,
    chunk: int | None = None,
) -> tuple[Output, Int32[Array, "batch block"]]:
    """:func:`fp4jax.generation.loop.complete` with a drafter, for a caller's own jit.

    Args:
      module: static.
      params: its tree.
      drafter: static.
      draft_params: its tree.
      tokens: right-padded prompts.
      lengths: tokens a row, at least 1.
      sampling: values, a row each.
      limits: likewise.
      features: static.
      capacity: static; cache slots a row, at least ``time`` and each length + max_tokens +
        block_size.
      size: static; at least the largest max_tokens.
      dtype: of the caches.
      chunk: as in :func:`fp4jax.generation.loop.prefill`.

    Returns:
      The output, and how many steps gave each row 1, 2, … block_size tokens.
    """
    batch = tokens.shape[0]
    caches = (
        module.init_cache(batch, capacity, dtype),
        drafter.init_cache(batch, capacity, dtype),
    )

    def feed(module: nn.Module, params: Any, *piece: Any) -> tuple[Array, Any]:
        return observed_prefill_chunk(module, params, drafter, draft_params, *piece)

    logits, (cache, draft) = loop.prefill(
        module, params, tokens, lengths, caches, chunk=chunk, feed=feed
    )
    begun = loop.begin(
        logits, cache, tokens, lengths, sampling, limits, features=features, size=size
    )
    state = run_speculation(
        module, params, drafter, draft_params,
        SpeculativeState.of(begun, draft, drafter.block_size), sampling, limits,
        jnp.int32(size), jnp.zeros(batch, jnp.bool_), features=features,
    )  # fmt: skip
    return state.target.output, state.accepted


def _forward(
    module: nn.Module,
    params: Any,
    tokens: Int32[Array, "batch time"],
    cache: Any,
    lengths: Int32[Array, " batch"] | None,
    taps: tuple[int, ...],
) -> Any:
    return module.apply({"params": params}, tokens, cache=cache, lengths=lengths, taps=taps)


def _remember_block(
    state: SamplerState,
    tokens: Int32[Array, "batch block"],
    taken: Int32[Array, " batch"],
    sampling: SamplingArrays,
    features: SamplingFeatures,
) -> SamplerState:
    """Penalty counts after the first ``taken`` tokens of each row."""
    if not (features.repetition or features.occurrence):
        return state
    for at in range(tokens.shape[1]):
        state = remember(state, tokens[:, at], sampling, features, taken > at)
    return state
