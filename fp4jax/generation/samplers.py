"""Choosing the next token: pure functions of logits, per-row values and a small state.

Which processors exist in a compiled function is static (:class:`SamplingFeatures`); their values
are arrays with one entry a row (:class:`SamplingArrays`), so a changed temperature, seed or bias
never recompiles and the rows of a batch may differ.

Order: logit bias, penalties, temperature, top-k, top-p, min-p, draw. Tokens are ranked by logit,
largest first, ties by lower id. Log-probabilities are of the model's own distribution: the
log-softmax of the logits as the model gave them, before all of these (vLLM's ``raw_logprobs``).

Row b draws with the threefry key fold_in(key(seed[b]), step), where step counts the tokens
generated so far: nothing else of the batch enters, so a row draws what it would draw alone.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from fp4jax.generation.buckets import bucket
from fp4jax.generation.sampling_params import MAX_SEED, SamplingParams
from fp4jax.generation.truncation import temper, truncate


@dataclasses.dataclass(frozen=True)
class SamplingFeatures:
    """Static: which processors a compiled function holds. A row that lacks one has neutral values.

    Attributes:
      stochastic: some row has a temperature above 0.
      top_k, top_p, min_p: some such row uses it.
      bias: slots for biased tokens a row (bucketed), 0 for none.
      repetition: some row has a repetition penalty.
      repetition_window: slots for its last tokens (bucketed), 0 where every row looks back on all.
      occurrence: some row has a presence or frequency penalty.
      top_logprobs: alternatives reported.
    """

    stochastic: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    bias: int = 0
    repetition: bool = False
    repetition_window: int = 0
    occurrence: bool = False
    top_logprobs: int = 0

    @classmethod
    def of(cls, rows: Sequence[SamplingParams]) -> SamplingFeatures:
        """The union of what ``rows`` need."""
        warm = [row for row in rows if row.temp > 0]
        biased = max(len(row.logit_bias) for row in rows)
        penal = [row for row in rows if row.repetition_penalty != 1]
        window = max((row.repetition_context_size or 0 for row in penal), default=0)
        return cls(
            stochastic=bool(warm),
            top_k=any(row.top_k for row in warm),
            top_p=any(row.top_p < 1 for row in warm),
            min_p=any(row.min_p for row in warm),
            bias=bucket(biased) if biased else 0,
            repetition=bool(penal),
            repetition_window=bucket(window) if window else 0,
            occurrence=any(row.presence_penalty or row.frequency_penalty for row in rows),
            top_logprobs=max(row.logprobs for row in rows),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingArrays:
    """Values of the processors, a row each; meanings as in :class:`SamplingParams`.

    Unused slots of ``bias_ids`` hold the largest int32, which every scatter drops.
    ``repetition_window`` 0 looks back on everything.
    """

    temp: Float32[Array, " batch"]
    top_k: Int32[Array, " batch"]
    top_p: Float32[Array, " batch"]
    min_p: Float32[Array, " batch"]
    repetition_penalty: Float32[Array, " batch"]
    repetition_window: Int32[Array, " batch"]
    presence_penalty: Float32[Array, " batch"]
    frequency_penalty: Float32[Array, " batch"]
    bias_ids: Int32[Array, "batch bias"]
    bias_values: Float32[Array, "batch bias"]
    seed: UInt32[Array, " batch"]

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], features: SamplingFeatures) -> SamplingArrays:
        """From one :class:`SamplingParams` a row, seeds taken as they are (None: a fresh one)."""
        off = np.iinfo(np.int32).max
        bias_ids = np.full((len(rows), features.bias), off, np.int32)
        bias_values = np.zeros((len(rows), features.bias), np.float32)
        for b, row in enumerate(rows):
            for slot, (token, value) in enumerate(row.bias_pairs):
                bias_ids[b, slot], bias_values[b, slot] = token, value

        def column(values, dtype) -> Array:
            return jnp.asarray(np.asarray(list(values), dtype))

        return cls(
            temp=column((r.temp for r in rows), np.float32),
            top_k=column((min(r.top_k, off) or off for r in rows), np.int32),
            top_p=column((r.top_p for r in rows), np.float32),
            min_p=column((r.min_p for r in rows), np.float32),
            repetition_penalty=column((r.repetition_penalty for r in rows), np.float32),
            repetition_window=column((r.repetition_context_size or 0 for r in rows), np.int32),
            presence_penalty=column((r.presence_penalty for r in rows), np.float32),
            frequency_penalty=column((r.frequency_penalty for r in rows), np.float32),
            bias_ids=jnp.asarray(bias_ids),
            bias_values=jnp.asarray(bias_values),
            seed=column(
                (secrets.randbelow(MAX_SEED + 1) if r.seed is None else r.seed for r in rows),
                np.uint32,
            ),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """What sampling remembers between steps. Counts are [B, 0] where no feature needs them.

    Attributes:
      step: tokens drawn so far.
      context_counts: times each token occurs in the repetition context.
      ring: the last tokens of a windowed context; the token at position p is in slot p mod window.
      context_length: prompt and generated tokens of a row so far.
      output_counts: times each token was generated.
    """

    step: Int32[Array, ""]
    context_counts: Int32[Array, "batch context_vocab"]
    ring: Int32[Array, "batch window"]
    context_length: Int32[Array, " batch"]
    output_counts: Int32[Array, "batch output_vocab"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sample:
    """One drawn token a row.

    Attributes:
      tokens: ids.
      logprobs: natural log of the model's own probability of them.
      top_tokens: the likeliest ids under the model, best first.
      top_logprobs: likewise, their logs.
      valid: False where the row's logits hold a NaN or +inf or nothing but -inf; its token means
        nothing then.
    """

    tokens: Int32[Array, " batch"]
    logprobs: Float32[Array, " batch"]
    top_tokens: Int32[Array, "batch top"]
    top_logprobs: Float32[Array, "batch top"]
    valid: Bool[Array, " batch"]


def init_sampler(
    params: SamplingArrays,
    features: SamplingFeatures,
    prompt: Int32[Array, "batch time"],
    lengths: Int32[Array, " batch"],
    vocab_size: int,
) -> SamplerState:
    """State before the first draw.

    Args:
      params: values.
      features: static.
      prompt: right-padded; read only for a repetition penalty, may be [B, 0] otherwise.
      lengths: prompt tokens a row.
      vocab_size: V.
    """
    batch, time = prompt.shape
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    counts = jnp.zeros((batch, vocab_size if features.repetition else 0), jnp.int32)
    ring = jnp.zeros((batch, features.repetition_window), jnp.int32)
    if features.repetition and time:
        at = jnp.arange(time, dtype=jnp.int32)[None, :]
        window = params.repetition_window[:, None]
        inside = (at < lengths[:, None]) & ((window == 0) | (at >= lengths[:, None] - window))
        counts = counts.at[rows, prompt].add(inside.astype(jnp.int32), mode="drop")
        if features.repetition_window:
            slot = jnp.where(inside & (window > 0), at % jnp.maximum(window, 1), ring.shape[1])
            ring = ring.at[rows, slot].set(prompt, mode="drop")
    return SamplerState(
        step=jnp.zeros((), jnp.int32),
        context_counts=counts,
        ring=ring,
        context_length=lengths,
        output_counts=jnp.zeros((batch, vocab_size if features.occurrence else 0), jnp.int32),
    )


def sample(
    logits: Float32[Array, "batch vocab"],
    params: SamplingArrays,
    state: SamplerState,
    features: SamplingFeatures,
) -> tuple[Sample, SamplerState]:
    """Draws one token a row; see the module's docstring for the order of processors."""
    scores = penalize(logits, params, state, features)
    valid = jnp.isfinite(jnp.max(scores, axis=-1))
    tokens = lax.argmax(scores, 1, jnp.int32)
    if features.stochastic:
        keys = position_keys(params.seed, jnp.broadcast_to(state.step, tokens.shape))
        drawn = draw(shaped(scores, params, features), keys)
        tokens = jnp.where(params.temp > 0, drawn, tokens)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top_logprobs, top_tokens = lax.top_k(logprobs, features.top_logprobs)
    result = Sample(
        tokens=tokens,
        logprobs=jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0],
        top_tokens=top_tokens.astype(jnp.int32),
        top_logprobs=top_logprobs,
        valid=valid,
    )
    return result, remember(state, tokens, params, features)


def penalize(
    logits: Float32[Array, "batch vocab"],
    params: SamplingArrays,
    state: SamplerState,
    features: SamplingFeatures,
) -> Float32[Array, "batch vocab"]:
    """Logit bias, then the repetition, presence and frequency penalties."""
    scores = logits
    if features.bias:
        rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        scores = scores.at[rows, params.bias_ids].add(params.bias_values, mode="drop")
    if features.repetition:
        factor = params.repetition_penalty[:, None]
        penal = jnp.where(scores > 0, scores / factor, scores * factor)
        scores = jnp.where(state.context_counts > 0, penal, scores)
    if features.occurrence:
        counts = state.output_counts
        scores = scores - jnp.where(counts > 0, params.presence_penalty[:, None], 0.0)
        scores = scores - counts.astype(jnp.float32) * params.frequency_penalty[:, None]
    return scores


def shaped(
    scores: Float32[Array, "batch vocab"], params: SamplingArrays, features: SamplingFeatures
) -> Float32[Array, "batch vocab"]:
    """Penalized logits after temperature and the truncations; a draw is from their softmax."""
    return truncate(
        temper(scores, params.temp),
        top_k=params.top_k if features.top_k else None,
        top_p=params.top_p if features.top_p else None,
        min_p=params.min_p if features.min_p else None,
    )


def position_keys(seed: UInt32[Array, " batch"], index: Int32[Array, " batch"]) -> Array:
    """The threefry key of each row's token number ``index``."""

    def row(value: Array, at: Array) -> Array:
        return jax.random.fold_in(jax.random.key(value, impl="threefry2x32"), at)

    return jax.vmap(row)(seed, index)


def draw(scores: Float32[Array, "batch vocab"], keys: Array) -> Int32[Array, " batch"]:
    """One id a row from the softmax of its scores: the largest sum with Gumbel noise."""

    def row(key: Array) -> Array:
        return jax.random.gumbel(key, scores.shape[1:], jnp.float32)

    return lax.argmax(scores + jax.vmap(row)(keys), 1, jnp.int32)


def remember(
    state: SamplerState,
    tokens: Int32[Array, " batch"],
    params: SamplingArrays,
    features: SamplingFeatures,
    kept: Bool[Array, " batch"] | None = None,
) -> SamplerState:
    """The state after ``tokens`` joined the context, in the rows that are ``kept`` (all)."""
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    if kept is None:
        kept = jnp.ones(tokens.shape, jnp.bool_)
    once = kept.astype(jnp.int32)
    counts, ring, outputs = state.context_counts, state.ring, state.output_counts
    if features.repetition:
        counts = counts.at[rows, tokens].add(once)
    if features.repetition_window:
        window = params.repetition_window
        slot = state.context_length % jnp.maximum(window, 1)
        leaving = ring[rows, slot]
        gone = kept & (window > 0) & (state.context_length >= window)
        counts = counts.at[rows, leaving].add(-gone.astype(jnp.int32))
        ring = ring.at[rows, slot].set(jnp.where(kept, tokens, leaving))
    if features.occurrence:
        outputs = outputs.at[rows, tokens].add(once)
    return SamplerState(state.step + 1, counts, ring, state.context_length + once, outputs)
