"""Drafting by hand: a drafter's cache that outlives a call, and says whose activations it holds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax.errors import EngineMismatchError
from fp4jax.generation import speculation
from fp4jax.generation.drafting import Draw, Proposal
from fp4jax.generation.drafts import as_draft, check_engine, drafter_id
from fp4jax.generation.requests import LanguageModel, make_requests
from fp4jax.generation.samplers import SamplingArrays, SamplingFeatures, init_sampler
from fp4jax.generation.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, eq=False)
class DraftContext:
    """What a drafter knows of the tokens that one engine has processed.

    Attributes:
      cache: the drafter's, made from that engine's activations.
      anchors: i32 [B], each row's last token, which the cache does not hold.
      engine_id: of that engine.
      draft_id: of the drafter's parameters.
    """

    cache: Any
    anchors: jax.Array
    engine_id: str
    draft_id: str


def read_context(
    model: LanguageModel, draft: Any, prompts: Sequence[Sequence[int]]
) -> DraftContext:
    """Runs ``model`` over all but the last token of each prompt, for ``draft`` to observe.

    Args:
      model: the target.
      draft: as ``draft=`` of :func:`fp4jax.generate`.
      prompts: token ids, at least one each.

    Raises:
      ConfigError, EngineMismatchError: as :func:`~fp4jax.generation.drafts.as_draft`.
      GenerationError: an empty prompt, one without room in the context, or a bad id.
    """
    from fp4jax.model import engine_id

    bound = as_draft(draft, model)
    rows = [row.prompt for row in make_requests(model, None, prompts, SamplingParams())]
    lengths = np.asarray([len(row) - 1 for row in rows], np.int32)
    tokens = np.zeros((len(rows), max(int(lengths.max()), 1)), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : lengths[b]] = row[:-1]
    cache = _observe(
        model.module, model.params, bound.drafter, bound.params, tokens, lengths,
        dtype=jnp.dtype(model.dtype),
    )  # fmt: skip
    anchors = jnp.asarray([row[-1] for row in rows], jnp.int32)
    return DraftContext(cache, anchors, engine_id(model.params), drafter_id(bound))


def propose_after(
    model: LanguageModel,
    draft: Any,
    context: DraftContext,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
) -> Proposal:
    """What ``draft`` proposes after ``context``, through the embedding and head of ``model``.

    Args:
      model: the target; the engine whose activations the context holds.
      draft: the drafter that made the context.
      context: from :func:`read_context`.
      sampling: for all rows or one a row; greedy by default.

    Raises:
      ConfigError: as :func:`~fp4jax.generation.drafts.as_draft`.
      EngineMismatchError: the context is another engine's or another drafter's.
    """
    bound = as_draft(draft, model)
    check_engine("the draft context was made from the activations of", context.engine_id, model)
    if context.draft_id != drafter_id(bound):
        raise EngineMismatchError(
            f"the draft context was made by drafter {context.draft_id}, but this one is "
            f"{drafter_id(bound)}; make it anew with this one"
        )
    batch = context.anchors.shape[0]
    if sampling is None or isinstance(sampling, SamplingParams):
        sampling = (sampling or SamplingParams(),) * batch
    features = SamplingFeatures.of(sampling)
    return _propose(
        model.module, model.params, bound.drafter, bound.params, context.anchors, context.cache,
        SamplingArrays.of(sampling, features), features=features,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("module", "drafter", "dtype"))
def _observe(module, params, drafter, draft_params, tokens, lengths, *, dtype) -> Any:
    batch, time = tokens.shape
    capacity = time + drafter.block_size
    caches = (
        module.init_cache(batch, capacity, dtype),
        drafter.init_cache(batch, capacity, dtype),
    )
    _, (_, draft) = speculation.observed_prefill_chunk(
        module, params, drafter, draft_params, tokens, lengths, caches
    )
    return draft


@functools.partial(jax.jit, static_argnames=("module", "drafter", "features"))
def _propose(
    module, params, drafter, draft_params, anchors, cache, sampling, *, features
) -> Proposal:
    batch = anchors.shape[0]
    none, nothing = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, 0), jnp.int32)
    vocab = jax.eval_shape(
        lambda: module.apply(
            {"params": params}, module.apply({"params": params}, anchors, method="embed"),
            method="logits",
        )
    ).shape[-1]  # fmt: skip
    state = init_sampler(sampling, features, nothing, none, vocab)
    draw = Draw(sampling, state, none, features)
    return drafter.propose(draft_params, module, params, anchors, cache, draw)
