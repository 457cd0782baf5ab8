"""``generate``, ``stream_generate``, ``batch_generate`` and ``generate_tokens``.

All four run the same compiled functions, so with the same prompt and sampling values they give the
same tokens and the same text. Everything about a request is checked before any device work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fp4jax.generation.cached_prompt import PromptCache
from fp4jax.generation.driving import open_checked, run_session, stream_session
from fp4jax.generation.requests import LanguageModel, Prompt, TextTokenizer, make_requests
from fp4jax.generation.results import BatchResult, GenerationStep, TokenResult
from fp4jax.generation.sampling_params import SamplingParams
from fp4jax.generation.session import PREFILL_CHUNK
from fp4jax.progress import Progress


def generate(
    model: LanguageModel,
    tokenizer: TextTokenizer,
    prompt: Prompt,
    *,
    sampling: SamplingParams | None = None,
    draft: Any = None,
    num_draft_tokens: int | None = None,
    prompt_cache: PromptCache | None = None,
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
      draft: proposes tokens, which the model then verifies several at a time: a draft model from
        ``fp4jax.load_draft``, :class:`~fp4jax.generation.prompt_lookup.PromptLookup`, or a
        :class:`~fp4jax.generation.drafts.Draft`. Greedy tokens stay those of the model alone, up to
        ties within rounding; sampled ones keep its distribution.
      num_draft_tokens: proposals a step; the drafter's own number by default.
      prompt_cache: what the model has made of the prompt's first tokens already
        (:func:`~fp4jax.generation.prompt_cache.make_prompt_cache`); the prompt is given whole.
      prefill_chunk: prompt tokens fed at once; bounds activation memory.
      progress: called as ``progress(stage, done, total)``: "compile" in compiled functions, only
        where one has to be compiled, and "prefill" in prompt tokens.
      **options: fields of :class:`SamplingParams` (``max_tokens=64, temp=0.7``), on top of it.

    Returns:
      The text, without stop strings and end-of-sequence tokens.

    Raises:
      GenerationError: an empty prompt, one that leaves no room in the context, an id outside the
        vocabulary, one that does not begin with the tokens of ``prompt_cache``, or logits that are
        not finite.
      SamplingError: bad sampling values.
      ConfigError: a draft that does not fit the model, or is not in ``prompt_cache``.
      PromptCacheError: a prompt cache of a model of another layout.
      EngineMismatchError: a draft that was paired with another engine, or its prompt cache.
    """
    params = SamplingParams.of(sampling, **options)
    requests = make_requests(model, tokenizer, [prompt], params)
    session = open_checked(
        model, requests, draft, num_draft_tokens, prompt_cache, prefill_chunk, progress
    )
    return run_session(session, requests, tokenizer).texts[0]


def batch_generate(
    model: LanguageModel,
    tokenizer: TextTokenizer | None,
    prompts: Sequence[Prompt],
    *,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    draft: Any = None,
    num_draft_tokens: int | None = None,
    prompt_cache: PromptCache | None = None,
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
      prompt_cache: of a beginning that all prompts share.
      draft, num_draft_tokens, prefill_chunk, progress, **options: as in :func:`generate`.

    Raises:
      Fp4JaxError: as in :func:`generate`.
    """
    rows: SamplingParams | list[SamplingParams]
    if sampling is None or isinstance(sampling, SamplingParams):
        rows = SamplingParams.of(sampling, **options)
    else:
        rows = [SamplingParams.of(row, **options) for row in sampling]
    requests = make_requests(model, tokenizer, prompts, rows)
    session = open_checked(
        model, requests, draft, num_draft_tokens, prompt_cache, prefill_chunk, progress
    )
    return run_session(session, requests, tokenizer)


def generate_tokens(
    model: LanguageModel,
    prompt_ids: Sequence[int],
    *,
    sampling: SamplingParams | None = None,
    draft: Any = None,
    num_draft_tokens: int | None = None,
    prompt_cache: PromptCache | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    progress: Progress | None = None,
    **options: Any,
) -> TokenResult:
    """Token ids that follow token ids, with no tokenizer. Arguments as in :func:`generate`.

    To run inside a jitted function of your own, use :func:`fp4jax.generation.loop.complete`.
    """
    params = SamplingParams.of(sampling, **options)
    requests = make_requests(model, None, [prompt_ids], params)
    session = open_checked(
        model, requests, draft, num_draft_tokens, prompt_cache, prefill_chunk, progress
    )
    result = run_session(session, requests, None)
    return TokenResult(
        tokens=result.tokens[0],
        finish_reason=result.finish_reasons[0],
        logprobs=result.logprobs[0],
        top_logprobs=result.top_logprobs[0],
        from_draft=result.from_draft[0],
        stats=result.stats,
    )


def stream_generate(
    model: LanguageModel,
    tokenizer: TextTokenizer,
    prompt: Prompt,
    *,
    sampling: SamplingParams | None = None,
    draft: Any = None,
    num_draft_tokens: int | None = None,
    prompt_cache: PromptCache | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    progress: Progress | None = None,
    **options: Any,
) -> Iterator[GenerationStep]:
    """One :class:`GenerationStep` a token; their texts together are what :func:`generate` gives.

    The request is checked in this call, before the first step is asked for. Closing the iterator
    or Ctrl-C between steps ends the generation. Arguments and errors as in :func:`generate`.
    """
    params = SamplingParams.of(sampling, **options)
    (request,) = make_requests(model, tokenizer, [prompt], params)
    session = open_checked(
        model, [request], draft, num_draft_tokens, prompt_cache, prefill_chunk, progress
    )
    return stream_session(session, request, tokenizer)
