"""``generate``, ``stream_generate``, ``batch_generate`` and ``generate_tokens``.

All four run the same compiled functions, so with the same prompt and sampling values they give the
same tokens and the same text. Everything about a request is checked before any device work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fp4jax.generation.requests import (
    LanguageModel,
    Prompt,
    Request,
    TextTokenizer,
    make_requests,
)
from fp4jax.generation.results import (
    BatchResult,
    GenerationStep,
    TokenLogprob,
    TokenResult,
)
from fp4jax.generation.sampling_params import SamplingParams
from fp4jax.generation.session import PREFILL_CHUNK, Session
from fp4jax.generation.state import Output
from fp4jax.generation.stop import RowText
from fp4jax.progress import Progress

STOP_CHECK_TOKENS = 16
"""Tokens decoded between two looks for stop strings where nothing is streamed."""


def generate(
    model: LanguageModel,
    tokenizer: TextTokenizer,
    prompt: Prompt,
    *,
    sampling: SamplingParams | None = None,
    draft: Any = None,
    prefill_chunk: int = PREFILL_CHUNK,
    progress: Progress | None = None,
    **options: Any,
) -> str:
    """The text that follows ``prompt``.

    Without stop strings the whole answer is one call to the device, which Ctrl-C ends only when it
    returns; :func:`stream_generate` can be ended after every token.

    Args:
      model: from ``fp4jax.load``.
      tokenizer: likewise.
      prompt: text (encoded as it is), token ids, or chat messages (through the chat template).
      sampling: a :class:`SamplingParams`; default greedy, 256 tokens.
      draft: reserved.
      prefill_chunk: prompt tokens fed at once; bounds activation memory.
      progress: called as ``progress(stage, done, total)``: "compile" in compiled functions, only
        where one has to be compiled, and "prefill" in prompt tokens.
      **options: fields of :class:`SamplingParams` (``max_tokens=64, temp=0.7``), on top of it.

    Returns:
      The text, without stop strings and end-of-sequence tokens.

    Raises:
      GenerationError: an empty prompt, one that leaves no room in the context, an id outside the
        vocabulary, or logits that are not finite.
      SamplingError: bad sampling values.
      UnsupportedError: a draft model.
    """
    params = SamplingParams.of(sampling, **options)
    requests = make_requests(model, tokenizer, [prompt], params, draft)
    return _run(model, tokenizer, requests, prefill_chunk, progress).texts[0]


def batch_generate(
    model: LanguageModel,
    tokenizer: TextTokenizer | None,
    prompts: Sequence[Prompt],
    *,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    draft: Any = None,
    prefill_chunk: int = PREFILL_CHUNK,
    progress: Progress | None = None,
    **options: Any,
) -> BatchResult:
    """Answers to several prompts of any lengths at once; each row gets what it gets alone.

    Args:
      model: from ``fp4jax.load``.
      tokenizer: likewise; None where all prompts are token ids and no stop string is used.
      prompts: a list of what :func:`generate` takes.
      sampling: one for all rows, where row i draws with seed + i; or one a row, each with its own
        seed (and no ``options``).
      draft, prefill_chunk, progress, **options: as in :func:`generate`.

    Raises:
      GenerationError, SamplingError, UnsupportedError: as in :func:`generate`.
    """
    rows: SamplingParams | list[SamplingParams]
    if sampling is None or isinstance(sampling, SamplingParams):
        rows = SamplingParams.of(sampling, **options)
    else:
        rows = [SamplingParams.of(row, **options) for row in sampling]
    requests = make_requests(model, tokenizer, prompts, rows, draft)
    return _run(model, tokenizer, requests, prefill_chunk, progress)


def generate_tokens(
    model: LanguageModel,
    prompt_ids: Sequence[int],
    *,
    sampling: SamplingParams | None = None,
    draft: Any = None,
    prefill_chunk: int = PREFILL_CHUNK,
    progress: Progress | None = None,
    **options: Any,
) -> TokenResult:
    """Token ids that follow token ids, with no tokenizer. Arguments as in :func:`generate`.

    To run inside a jitted function of your own, use :func:`fp4jax.generation.loop.complete`.
    """
    params = SamplingParams.of(sampling, **options)
    requests = make_requests(model, None, [prompt_ids], params, draft)
    result = _run(model, None, requests, prefill_chunk, progress)
    return TokenResult(
        tokens=result.tokens[0],
        finish_reason=result.finish_reasons[0],
        logprobs=result.logprobs[0],
        top_logprobs=result.top_logprobs[0],
        stats=result.stats,
    )


def stream_generate(
    model: LanguageModel,
    tokenizer: TextTokenizer,
    prompt: Prompt,
    *,
    sampling: SamplingParams | None = None,
    draft: Any = None,
    prefill_chunk: int = PREFILL_CHUNK,
    progress: Progress | None = None,
    **options: Any,
) -> Iterator[GenerationStep]:
    """One :class:`GenerationStep` a token; their texts together are what :func:`generate` gives.

    The request is checked in this call, before the first step is asked for. Closing the iterator
    or Ctrl-C between steps ends the generation. Arguments and errors as in :func:`generate`.
    """
    params = SamplingParams.of(sampling, **options)
    (request,) = make_requests(model, tokenizer, [prompt], params, draft)
    session = Session(model, [request], prefill_chunk=prefill_chunk, progress=progress)
    return _stream(session, request, tokenizer)


def _stream(
    session: Session, request: Request, tokenizer: TextTokenizer
) -> Iterator[GenerationStep]:
    row = _Row(request, tokenizer)
    session.prefill()
    ahead = session.window(0, 1)
    for index in range(request.sampling.max_tokens):
        window = ahead
        if index + 1 < request.sampling.max_tokens:
            # The device goes on while the host reads and shows the token before.
            session.advance(index + 2)
            ahead = session.window(index + 1, 1)
        text = row.take(session.fetch(window), 0, 0)
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
        )
        if row.finish_reason is not None:
            return


def _run(
    model: LanguageModel,
    tokenizer: TextTokenizer | None,
    requests: Sequence[Request],
    prefill_chunk: int,
    progress: Progress | None,
) -> BatchResult:
    """All rows to their ends: one call to the device, or several where stop strings end rows."""
    session = Session(model, requests, prefill_chunk=prefill_chunk, progress=progress)
    rows = [_Row(request, tokenizer) for request in requests]
    longest = max(request.sampling.max_tokens for request in requests)
    session.prefill()
    if any(request.sampling.stop for request in requests):
        for begin in range(0, session.size, STOP_CHECK_TOKENS):
            stopped = np.asarray([row.finish_reason is not None for row in rows])
            if stopped.all():
                break
            session.advance(begin + STOP_CHECK_TOKENS, stopped)
            output = session.fetch(session.window(begin, STOP_CHECK_TOKENS))
            for b, row in enumerate(rows):
                _take_all(row, output, b, begin)
    else:
        session.advance(longest)
        output = session.fetch()
        for b, row in enumerate(rows):
            _take_all(row, output, b, 0)
    return BatchResult(
        texts=tuple("".join(row.texts) for row in rows),
        tokens=tuple(tuple(row.tokens) for row in rows),
        finish_reasons=tuple(str(row.finish_reason) for row in rows),
        logprobs=tuple(tuple(row.logprobs) for row in rows),
        top_logprobs=tuple(tuple(row.top_logprobs) for row in rows),
        stats=session.stats(sum(len(row.tokens) for row in rows)),
    )


def _take_all(row: _Row, output: Output, b: int, begin: int) -> None:
    """Takes the entries of ``output``, which starts at token ``begin``, until the row ends."""
    for at in range(min(int(output.count[b]) - begin, output.tokens.shape[1])):
        if row.finish_reason is None:
            row.take(output, b, at)


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
        self.finish_reason: str | None = None

    def take(self, output: Output, b: int, at: int) -> str:
        """Adds entry ``at`` of row ``b`` (numpy arrays) and returns its text."""
        token = int(output.tokens[b, at])
        piece = self._text.add(token)
        ids = output.top_tokens[b, at, : self._top].tolist()
        logs = output.top_logprobs[b, at, : self._top].tolist()
        self.texts.append(piece.text)
        self.tokens.append(token)
        self.logprobs.append(float(output.logprobs[b, at]))
        self.top_logprobs.append(tuple(zip(ids, logs, strict=True)))
        self.finish_reason = piece.finish_reason
        return piece.text
