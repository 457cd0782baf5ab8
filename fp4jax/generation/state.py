"""What a generation carries from step to step, and what comes out of it, as pytrees."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from fp4jax.generation.acceptance import Verdict
from fp4jax.generation.samplers import Sample, SamplerState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Limits:
    """When a row ends.

    Attributes:
      stop_ids: token ids that end the row; unused slots hold -1.
      max_tokens: tokens it may generate.
    """

    stop_ids: Int32[Array, "batch stops"]
    max_tokens: Int32[Array, " batch"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """What was generated so far; entries from ``count[b]`` on are 0 and mean nothing.

    Attributes:
      tokens: ids, a stop id that ended the row included.
      logprobs: natural log of the model's own probability of each.
      top_tokens: likeliest alternatives, best first.
      top_logprobs: their logs.
      count: tokens of each row.
      finished: the row met a stop id or its limit, or is invalid.
      invalid: the row ended because its logits were not finite; its last token means nothing.
      from_draft: a drafter proposed the token.
    """

    tokens: Int32[Array, "batch size"]
    logprobs: Float32[Array, "batch size"]
    top_tokens: Int32[Array, "batch size top"]
    top_logprobs: Float32[Array, "batch size top"]
    count: Int32[Array, " batch"]
    finished: Bool[Array, " batch"]
    invalid: Bool[Array, " batch"]
    from_draft: Bool[Array, "batch size"]

    @classmethod
    def empty(cls, batch: int, size: int, top: int) -> Output:
        """Room for ``size`` tokens a row with ``top`` alternatives each."""
        return cls(
            tokens=jnp.zeros((batch, size), jnp.int32),
            logprobs=jnp.zeros((batch, size), jnp.float32),
            top_tokens=jnp.zeros((batch, size, top), jnp.int32),
            top_logprobs=jnp.zeros((batch, size, top), jnp.float32),
            count=jnp.zeros(batch, jnp.int32),
            finished=jnp.zeros(batch, jnp.bool_),
            invalid=jnp.zeros(batch, jnp.bool_),
            from_draft=jnp.zeros((batch, size), jnp.bool_),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoopState:
    """All that a generation carries from step to step; donate it.

    Attributes:
      cache: the module's cache, which does not hold ``last`` yet.
      last: the token drawn last.
      sampler: penalty counts and the step.
      output: tokens so far.
    """

    cache: Any
    last: Int32[Array, " batch"]
    sampler: SamplerState
    output: Output


def record(output: Output, drawn: Sample, step: Int32[Array, ""], limits: Limits) -> Output:
    """``output`` with what each unfinished row drew at ``step``, and who is finished by it."""
    active = ~output.finished

    def put(buffer: Array, value: Array) -> Array:
        mask = active.reshape(-1, *(1,) * (value.ndim - 1))
        column = jnp.where(mask, value, jnp.zeros_like(value))[:, None]
        return lax.dynamic_update_slice_in_dim(buffer, column, step, axis=1)

    count = output.count + active.astype(jnp.int32)
    stop = jnp.any(drawn.tokens[:, None] == limits.stop_ids, axis=1)
    invalid = active & ~drawn.valid
    ended = stop | (count >= limits.max_tokens) | ~drawn.valid
    return Output(
        tokens=put(output.tokens, drawn.tokens),
        logprobs=put(output.logprobs, drawn.logprobs),
        top_tokens=put(output.top_tokens, drawn.top_tokens),
        top_logprobs=put(output.top_logprobs, drawn.top_logprobs),
        count=count,
        finished=output.finished | ended,
        invalid=output.invalid | invalid,
        from_draft=output.from_draft,
    )


def record_block(
    output: Output, verdict: Verdict, limits: Limits
) -> tuple[Output, Int32[Array, " batch"]]:
    """``output`` with what a verification pass gave each unfinished row, and how many that is.

    A row ends at the first stop id, at its limit, or at logits that are not finite; what comes
    after in the block is dropped.
    """
    batch, block = verdict.tokens.shape
    at = jnp.arange(block, dtype=jnp.int32)[None, :]
    active = ~output.finished
    stop = jnp.any(verdict.tokens[:, :, None] == limits.stop_ids[:, None, :], axis=2)
    reached = output.count[:, None] + at + 1 >= limits.max_tokens[:, None]
    offered = at <= verdict.accepted[:, None]
    ends = offered & (stop | reached | ~verdict.valid)
    before = jnp.cumsum(ends.astype(jnp.int32), axis=1) - ends.astype(jnp.int32)
    kept = active[:, None] & offered & (before == 0)
    taken = jnp.sum(kept, axis=1, dtype=jnp.int32)

    size = output.tokens.shape[1]
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    slots = jnp.where(kept, output.count[:, None] + at, size)  # past the end: dropped

    def put(buffer: Array, values: Array) -> Array:
        return buffer.at[rows, slots].set(values, mode="drop")

    return Output(
        tokens=put(output.tokens, verdict.tokens),
        logprobs=put(output.logprobs, verdict.logprobs),
        top_tokens=put(output.top_tokens, verdict.top_tokens),
        top_logprobs=put(output.top_logprobs, verdict.top_logprobs),
        count=output.count + taken,
        finished=output.finished | jnp.any(kept & ends, axis=1),
        invalid=output.invalid | jnp.any(kept & ~verdict.valid, axis=1),
        from_draft=put(output.from_draft, at < verdict.accepted[:, None]),
    ), taken
