"""Runs checked requests to their ends, streamed or at once, with a drafter or without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fp4jax.generation.cached_prompt import PromptCache, check_prompt_cache
from fp4jax.generation.drafts import Draft, as_draft
from fp4jax.generation.requests import LanguageModel, Request, TextTokenizer
from fp4jax.generation.results import BatchResult, GenerationStep, TokenLogprob
from fp4jax.generation.session import Session, Window
from fp4jax.generation.speculative_session import SpeculativeSession
from fp4jax.generation.stop import RowText
from fp4jax.progress import Progress

STOP_CHECK_TOKENS = 16
"""Tokens decoded between two looks for stop strings where nothing is streamed."""


def open_session(
    model: LanguageModel,
    requests: Sequence[Request],
    draft: Draft | None,
    prefill_chunk: int,
    progress: Progress | None,
    prompt_cache: PromptCache | None = None,
) -> Session:
    """A session that has not begun; arguments as in :mod:`fp4jax.generation.api`, all checked."""
    if draft is None:
        return Session(
            model, requests,
            prefill_chunk=prefill_chunk, progress=progress, prompt_cache=prompt_cache,
        )  # fmt: skip
    return SpeculativeSession(
        model, requests, draft,
        prefill_chunk=prefill_chunk, progress=progress, prompt_cache=prompt_cache,
    )  # fmt: skip


def open_checked(
    model: LanguageModel,
    requests: Sequence[Request],
    draft: Any,
    num_draft_tokens: int | None,
    prompt_cache: Any,
    prefill_chunk: int,
    progress: Progress | None,
) -> Session:
    """:func:`open_session` of what a caller gave as draft and prompt cache.

    Raises:
      ConfigError, GenerationError, PromptCacheError, EngineMismatchError: as
        :func:`~fp4jax.generation.drafts.as_draft` and
        :func:`~fp4jax.generation.cached_prompt.check_prompt_cache`.
    """
    bound = None if draft is None else as_draft(draft, model, num_draft_tokens)
    if prompt_cache is not None:
        prompt_cache = check_prompt_cache(prompt_cache, model, requests, bound)
    return open_session(model, requests, bound, prefill_chunk, progress, prompt_cache)


def stream_session(
    session: Session, request: Request, tokenizer: TextTokenizer
) -> Iterator[GenerationStep]:
    """One step a token of a session with one row."""
    row = _Row(request, tokenizer)
    session.prefill()
    ahead = session.window()
    while row.finish_reason is None:
        window = ahead
        # The device goes on while the host reads and shows the tokens before.
        session.advance(1)
        ahead = session.window()
        fetched = session.fetch(window)
        for at in range(fetched.new(0)):
            text = row.take(fetched, 0, at)
            stats = session.stats(len(row.tokens))
            yield GenerationStep(
                text=text,
                token=row.tokens[-1],
                logprob=row.logprobs[-1],
                top_logprobs=row.top_logprobs[-1],
                prompt_tokens=stats.prompt_tokens,
                prompt_tps=stats.prompt_tps,
                generation_tokens=stats.generation_tokens,
                generation_tps=stats.generation_tps,
                peak_memory=stats.peak_memory,
                finish_reason=row.finish_reason,
                from_draft=row.from_draft[-1],
                acceptance=stats.acceptance,
                cached_tokens=stats.cached_tokens,
            )
            if row.finish_reason is not None:
                return


def run_session(
    session: Session, requests: Sequence[Request], tokenizer: TextTokenizer | None
) -> BatchResult:
    """All rows to their ends: one call to the device, or several where stop strings end rows."""
    rows = [_Row(request, tokenizer) for request in requests]
    session.prefill()
    if any(request.sampling.stop for request in requests):
        _take_new(rows, session.fetch(session.window()))
        while any(row.finish_reason is None for row in rows):
            stopped = np.asarray([row.finish_reason is not None for row in rows])
            session.advance(STOP_CHECK_TOKENS, stopped)
            _take_new(rows, session.fetch(session.window(STOP_CHECK_TOKENS)))
    else:
        session.advance()
        _take_new(rows, session.fetch(session.everything()))
    return BatchResult(
        texts=tuple("".join(row.texts) for row in rows),
        tokens=tuple(tuple(row.tokens) for row in rows),
        finish_reasons=tuple(str(row.finish_reason) for row in rows),
        logprobs=tuple(tuple(row.logprobs) for row in rows),
        top_logprobs=tuple(tuple(row.top_logprobs) for row in rows),
        from_draft=tuple(tuple(row.from_draft) for row in rows),
        stats=session.stats(sum(len(row.tokens) for row in rows)),
    )


def _take_new(rows: Sequence[_Row], window: Window) -> None:
    """Gives each row its new entries, until it ends."""
    for b, row in enumerate(rows):
        for at in range(window.new(b)):
            if row.finish_reason is None:
                row.take(window, b, at)


class _Row:
    """What one row has given so far."""

    def __init__(self, request: Request, tokenizer: TextTokenizer | None) -> None:
        self._text = RowText(
            tokenizer.detokenizer() if tokenizer is not None else None,
            request.sampling.stop,
            request.stop_ids,
            request.sampling.max_tokens,
        )
        self._top = request.sampling.logprobs
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[tuple[TokenLogprob, ...]] = []
        self.from_draft: list[bool] = []
        self.finish_reason: str | None = None

    def take(self, window: Window, b: int, at: int) -> str:
        """Adds entry ``at`` of row ``b`` of a fetched window and returns its text."""
        output = window.output
        token = int(output.tokens[b, at])
        piece = self._text.add(token)
        ids = output.top_tokens[b, at, : self._top].tolist()
        logs = output.top_logprobs[b, at, : self._top].tolist()
        self.texts.append(piece.text)
        self.tokens.append(token)
        self.logprobs.append(float(output.logprobs[b, at]))
        self.top_logprobs.append(tuple(zip(ids, logs, strict=True)))
        self.from_draft.append(bool(output.from_draft[b, at]))
        self.finish_reason = piece.finish_reason
        return piece.text
