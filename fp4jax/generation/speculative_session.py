"""The host side of one generation with a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fp4jax.generation.buckets import bucket, right_padded
from fp4jax.generation.cached_prompt import PromptCache
from fp4jax.generation.compiled import (
    jit_draft_observe,
    jit_draft_prefill,
    jit_init_draft_cache,
    jit_place,
    jit_speculate,
)
from fp4jax.generation.drafts import Draft
from fp4jax.generation.requests import LanguageModel, Request
from fp4jax.generation.results import AcceptanceStats, GenerationStats
from fp4jax.generation.session import PREFILL_CHUNK, Session, Window
from fp4jax.generation.speculation import SpeculativeState
from fp4jax.generation.state import LoopState, Output
from fp4jax.progress import Progress


class SpeculativeSession(Session):
    """:class:`~fp4jax.generation.session.Session` whose steps verify what a drafter proposes.

    Args:
      model: the engine.
      requests: one a row.
      draft: checked against the model.
      prefill_chunk: prompt tokens fed at once, at least 1.
      progress: as there.
      prompt_cache: as there; holds a cache of the drafter where it reads activations.
    """

    def __init__(
        self,
        model: LanguageModel,
        requests: Sequence[Request],
        draft: Draft,
        *,
        prefill_chunk: int = PREFILL_CHUNK,
        progress: Progress | None = None,
        prompt_cache: PromptCache | None = None,
    ) -> None:
        self._draft = draft
        self._block = draft.drafter.block_size
        super().__init__(
            model, requests, prefill_chunk=prefill_chunk, progress=progress,
            overhang=self._block, prompt_cache=prompt_cache,
        )  # fmt: skip
        self._accepted = np.zeros((len(requests), self._block), np.int32)

    def fetch(self, window: Window) -> Window:
        """Likewise."""
        host = super().fetch(window)
        self._accepted = host.accepted
        return host

    def stats(self, generated: int, acceptance: AcceptanceStats | None = None) -> GenerationStats:
        """Likewise, with what the drafter came to."""
        return super().stats(generated, acceptance or AcceptanceStats.of(self._accepted))

    @property
    def _output(self) -> Output:
        return self._state.target.output

    @property
    def _counts(self) -> Any:
        return self._state.accepted

    def _steps(self, tokens: int) -> int:
        return max(tokens // self._block, 1)

    def _least(self, tokens: int) -> int:
        return self._steps(tokens)

    def _most(self, tokens: int) -> int:
        return self._steps(tokens) * self._block

    def _init_cache(self) -> Any:
        cache, prefix = super()._init_cache(), self._prefix
        drafter, sizes = self._draft.drafter, self._sizes
        if prefix is not None and drafter.taps:
            return cache, self._call(
                jit_place, drafter, prefix.draft, shown=False, axes=prefix.draft_axes, **sizes
            )
        draft = self._call(jit_init_draft_cache, drafter, shown=False, **sizes)
        if prefix is not None:
            batch, width = len(self._requests), min(bucket(self._known), self._capacity)
            tokens = right_padded([prefix.tokens] * batch, width)
            draft = self._call(
                jit_draft_observe, drafter, self._draft.params, draft, tokens,
                np.full(batch, self._known, np.int32), shown=False,
            )  # fmt: skip
        return cache, draft

    def _with_cache(self, state: LoopState, cache: Any) -> SpeculativeState:
        target, draft = cache
        return SpeculativeState.of(super()._with_cache(state, target), draft, self._block)

    def _prefill(self, tokens: np.ndarray, lengths: np.ndarray, cache: Any) -> tuple[Any, Any]:
        model, draft = self._model, self._draft
        return self._call(
            jit_draft_prefill, model.module, model.params, draft.drafter, draft.params,
            tokens, lengths, cache,
        )  # fmt: skip

    def _decode(self, tokens: int | None, stopped: np.ndarray) -> None:
        steps = self.size if tokens is None else self._steps(tokens)
        model, draft, state, self._state = self._model, self._draft, self._state, None
        self._state = self._call(
            jit_speculate, model.module, model.params, draft.drafter, draft.params, state,
            self._sampling, self._limits, np.int32(steps), stopped,
            features=self._features,
        )  # fmt: skip
