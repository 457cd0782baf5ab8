"""The jittable core: prefill, one decode step, and the whole loop, as pure functions.

``module`` is a Flax linen module (hashable, static) with ``init_cache(batch, capacity, dtype)``,
a call ``module.apply({"params": params}, tokens, cache=cache, lengths=lengths)`` that returns
``.hidden`` [B, T, H] and ``.cache``, and a method ``logits``: hidden [..., H] to f32 [..., V].
``params`` is its tree, always an argument, never captured.

Inside a jitted function of one's own, :func:`complete` runs all of it::

    @functools.partial(jax.jit, static_argnames=("module",))
    def answer(module, params, tokens, lengths, sampling, limits):
        return complete(
            module, params, tokens, lengths, sampling, limits,
            features=SamplingFeatures(), capacity=256, size=64, dtype=jnp.bfloat16,
        ).tokens

The host driver (:mod:`fp4jax.generation.session`) calls the same functions one at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from fp4jax.generation.samplers import SamplingArrays, SamplingFeatures, init_sampler, sample
from fp4jax.generation.state import Limits, LoopState, Output, record


def prefill_chunk(
    module: nn.Module,
    params: Any,
    tokens: Int32[Array, "batch time"],
    lengths: Int32[Array, " batch"],
    cache: Any,
) -> tuple[Float[Array, "batch h"], Any]:
    """Feeds the next tokens of each row's prompt.

    Args:
      module: static.
      params: its tree.
      tokens: right-padded.
      lengths: valid tokens a row, 0 where a row's prompt has ended in an earlier chunk.
      cache: continued from; its capacity holds position + time of each row.

    Returns:
      The hidden state of each row's last token here (meaningless for length 0), and the cache.
    """
    out: Any = module.apply({"params": params}, tokens, cache=cache, lengths=lengths)
    at = jnp.maximum(lengths - 1, 0)[:, None, None]
    return jnp.take_along_axis(out.hidden, at, axis=1)[:, 0], out.cache


def latest(
    lengths: Int32[Array, " batch"],
    hidden: Float[Array, "batch h"],
    earlier: Float[Array, "batch h"],
) -> Float[Array, "batch h"]:
    """``hidden`` of the rows that had tokens in this chunk, ``earlier`` of the others."""
    return jnp.where((lengths > 0)[:, None], hidden, earlier)


def prefill(
    module: nn.Module,
    params: Any,
    tokens: Int32[Array, "batch time"],
    lengths: Int32[Array, " batch"],
    cache: Any,
    *,
    chunk: int | None = None,
    feed: Callable[..., tuple[Array, Any]] = prefill_chunk,
) -> tuple[Float32[Array, "batch vocab"], Any]:
    """Feeds whole prompts and returns the logits that follow them, with the cache.

    Args:
      module: static.
      params: its tree.
      tokens: right-padded.
      lengths: tokens a row, at least 1.
      cache: an empty one, or one to continue.
      chunk: static; tokens fed at once, which bounds activation memory. ``time`` must be a multiple
        of it or not exceed it.
      feed: called as :func:`prefill_chunk` is, once a piece; ``cache`` is whatever it takes.
    """
    time = tokens.shape[1]
    if chunk is None or time <= chunk:
        hidden, cache = feed(module, params, tokens, lengths, cache)
        return _logits(module, params, hidden), cache
    if time % chunk:
        raise ValueError(f"prompt width {time} must be a multiple of chunk={chunk}")
    pieces = tokens.reshape(tokens.shape[0], time // chunk, chunk).swapaxes(0, 1)

    def length_of(index: Array) -> Array:
        return jnp.clip(lengths - index * chunk, 0, chunk)

    def body(carry: tuple[Array, Any], item: tuple[Array, Array]) -> tuple[tuple[Array, Any], None]:
        piece, index = item
        hidden, cache = feed(module, params, piece, length_of(index), carry[1])
        return (latest(length_of(index), hidden, carry[0]), cache), None

    first = feed(module, params, pieces[0], length_of(jnp.int32(0)), cache)
    indices = jnp.arange(1, time // chunk, dtype=jnp.int32)
    (hidden, cache), _ = lax.scan(body, first, (pieces[1:], indices))
    return _logits(module, params, hidden), cache


def decode_step(
    module: nn.Module,
    params: Any,
    tokens: Int32[Array, " batch"],
    cache: Any,
    active: Bool[Array, " batch"] | None = None,
) -> tuple[Float32[Array, "batch vocab"], Any]:
    """Feeds one token a row and returns the logits that follow, with the cache.

    Rows that are not ``active`` leave their cache entry as it was; their logits mean nothing.
    """
    ones = jnp.ones_like(tokens) if active is None else active.astype(jnp.int32)
    out: Any = module.apply({"params": params}, tokens[:, None], cache=cache, lengths=ones)
    return _logits(module, params, out.hidden[:, 0]), out.cache


def start(
    module: nn.Module,
    params: Any,
    hidden: Float[Array, "batch h"],
    cache: Any,
    prompt: Int32[Array, "batch time"],
    lengths: Int32[Array, " batch"],
    sampling: SamplingArrays,
    limits: Limits,
    *,
    features: SamplingFeatures,
    size: int,
) -> LoopState:
    """:func:`begin` from the prompt's last hidden state.

    Args:
      module: static.
      params: its tree.
      hidden: from :func:`prefill_chunk`.
      cache, prompt, lengths, sampling, limits, features, size: as there.
    """
    logits = _logits(module, params, hidden)
    return begin(logits, cache, prompt, lengths, sampling, limits, features=features, size=size)


def run_loop(
    module: nn.Module,
    params: Any,
    state: LoopState,
    sampling: SamplingArrays,
    limits: Limits,
    limit: Int32[Array, ""],
    stopped: Bool[Array, " batch"],
    *,
    features: SamplingFeatures,
) -> LoopState:
    """Decodes until ``limit`` tokens a row are there in all, or every row has ended.

    One ``lax.while_loop``; ``limit`` is a value, so one compiled function serves a whole
    generation, a chunk of it and a single streamed token, with the same numbers.

    Args:
      module: static.
      params: its tree.
      state: from :func:`start` or an earlier call.
      sampling: values, a row each.
      limits: likewise.
      limit: tokens generated a row, earlier calls included.
      stopped: rows to end now (the caller saw a stop string).
      features: static.
    """
    output = dataclasses.replace(state.output, finished=state.output.finished | stopped)
    state = dataclasses.replace(state, output=output)

    def more(state: LoopState) -> Bool[Array, ""]:
        return (state.sampler.step < limit) & ~jnp.all(state.output.finished)

    def body(state: LoopState) -> LoopState:
        active = ~state.output.finished
        logits, cache = decode_step(module, params, state.last, state.cache, active)
        drawn, sampler = sample(logits, sampling, state.sampler, features)
        output = record(state.output, drawn, state.sampler.step, limits)
        return LoopState(cache=cache, last=drawn.tokens, sampler=sampler, output=output)

    return lax.while_loop(more, body, state)


def complete(
    module: nn.Module,
    params: Any,
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
) -> Output:
    """Prompt to finished output in one traceable function, for use inside a caller's own jit.

    Args:
      module: static.
      params: its tree.
      tokens: right-padded prompts.
      lengths: tokens a row, at least 1.
      sampling: values, a row each (:meth:`SamplingArrays.of`).
      limits: stop ids and token limits, a row each.
      features: static (:meth:`SamplingFeatures.of` of the same rows).
      capacity: static; cache slots a row, at least ``time`` and each length + max_tokens.
      size: static; at least the largest max_tokens.
      dtype: of the cache.
      chunk: as in :func:`prefill`.
    """
    cache = module.init_cache(tokens.shape[0], capacity, dtype)
    logits, cache = prefill(module, params, tokens, lengths, cache, chunk=chunk)
    state = begin(logits, cache, tokens, lengths, sampling, limits, features=features, size=size)
    stopped = jnp.zeros(tokens.shape[0], jnp.bool_)
    limit = jnp.int32(size)
    return run_loop(
        module, params, state, sampling, limits, limit, stopped, features=features
    ).output


def _logits(
    module: nn.Module, params: Any, hidden: Float[Array, "batch h"]
) -> Float32[Array, "batch vocab"]:
    logits: Any = module.apply({"params": params}, hidden, method="logits")
    return logits


def begin(
    logits: Float32[Array, "batch vocab"],
    cache: Any,
    prompt: Int32[Array, "batch time"],
    lengths: Int32[Array, " batch"],
    sampling: SamplingArrays,
    limits: Limits,
    *,
    features: SamplingFeatures,
    size: int,
) -> LoopState:
    """Draws the first token of each row.

    Args:
      logits: what follows the prompts.
      cache: holds the prompts.
      prompt: right-padded; read only for a repetition penalty, may be [B, 0] otherwise.
      lengths: prompt tokens a row.
      sampling: values, a row each.
      limits: likewise.
      features: static.
      size: static; room for generated tokens, at least the largest ``limits.max_tokens``.
    """
    batch, vocab = logits.shape
    empty = Output.empty(batch, size, features.top_logprobs)
    sampler = init_sampler(sampling, features, prompt, lengths, vocab)
    drawn, after = sample(logits, sampling, sampler, features)
    output = record(empty, drawn, sampler.step, limits)
    return LoopState(cache=cache, last=drawn.tokens, sampler=after, output=output)
