"""Checks what was asked for and turns it into token ids, before any device work."""

from __future__ import annotations

import dataclasses
import operator
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from fp4jax.errors import GenerationError, SamplingError
from fp4jax.generation.sampling_params import MAX_SEED, SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Raw text, token ids, or chat messages (dicts with "role" and "content")."""


@runtime_checkable
class LanguageModel(Protocol):
    """What generation needs of a model; see :mod:`fp4jax.generation.loop` for ``module``."""

    @property
    def module(self) -> Any: ...
    @property
    def params(self) -> Any: ...
    @property
    def config(self) -> Any: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def max_context(self) -> int: ...
    @property
    def dtype(self) -> Any: ...


@runtime_checkable
class Detokenizer(Protocol):
    """Turns ids into text as they come."""

    def add(self, token_id: int, /) -> str: ...
    def flush(self) -> str: ...


@runtime_checkable
class TextTokenizer(Protocol):
    """What generation needs of a tokenizer."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /) -> list[int]: ...
    def detokenizer(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Request:
    """One row, checked.

    Attributes:
      prompt: token ids, at least one.
      sampling: with its seed filled in and ``max_tokens`` clipped to the room in the context.
      stop_ids: ids that end the row: its own, and the end-of-sequence ids unless ignored.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop_ids: tuple[int, ...]


def make_requests(
    model: LanguageModel,
    tokenizer: TextTokenizer | None,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams],
) -> tuple[Request, ...]:
    """One request a prompt.

    Args:
      model: gives vocabulary, context and end-of-sequence ids.
      tokenizer: None where all prompts are token ids and no stop string is used.
      prompts: see :data:`Prompt`.
      sampling: for all rows (row i draws with seed + i), or one a row (seeds as they are).

    Raises:
      GenerationError: no prompt, an empty one, one without room in the context, or a bad id.
      SamplingError: values that do not fit the vocabulary, or stop strings without a tokenizer.
    """
    if isinstance(prompts, str) or not len(prompts):
        raise GenerationError("prompts must be a non-empty list of prompts")
    if all(isinstance(prompt, Mapping) for prompt in prompts):
        raise GenerationError(
            "prompts is one conversation; pass a list of conversations: [messages]"
        )
    rows = _rows(sampling, len(prompts))
    several = len(prompts) > 1
    return tuple(
        _request(model, tokenizer, prompt, row, f"prompt {i}" if several else "the prompt")
        for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
    )


def _rows(
    sampling: SamplingParams | Sequence[SamplingParams], batch: int
) -> tuple[SamplingParams, ...]:
    if not isinstance(sampling, SamplingParams):
        if len(sampling) != batch:
            raise SamplingError(f"sampling has {len(sampling)} entries for {batch} prompts")
        return tuple(_seeded(row, 0) for row in sampling)
    base = _seeded(sampling, 0)
    return tuple(_seeded(base, i) for i in range(batch))


def _seeded(sampling: SamplingParams, offset: int) -> SamplingParams:
    seed = secrets.randbelow(MAX_SEED + 1) if sampling.seed is None else sampling.seed
    return dataclasses.replace(sampling, seed=(seed + offset) % (MAX_SEED + 1))


def _request(
    model: LanguageModel,
    tokenizer: TextTokenizer | None,
    prompt: Prompt,
    sampling: SamplingParams,
    name: str,
) -> Request:
    vocab_size = int(model.config.vocab_size)
    sampling.check_vocabulary(vocab_size)
    if sampling.stop and tokenizer is None:
        raise SamplingError(f"stop={sampling.stop!r} needs a tokenizer; use stop_token_ids instead")
    ids = _encode(tokenizer, prompt, name)
    if not ids:
        raise GenerationError(f"{name} is empty: it has no tokens to continue from")
    for at, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise GenerationError(
                f"{name} holds token id {token} at position {at}; the vocabulary has ids 0 to "
                f"{vocab_size - 1}"
            )
    room = model.max_context - len(ids)
    if room < 1:
        raise GenerationError(
            f"{name} has {len(ids)} tokens, which leaves no room in the model's context of "
            f"{model.max_context}; shorten it to at most {model.max_context - 1}"
        )
    eos: tuple[int, ...] = ()
    if not sampling.ignore_eos:
        eos = (*model.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer is not None else ()))
    return Request(
        prompt=ids,
        sampling=dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, room)),
        stop_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *eos))),
    )


def _encode(tokenizer: TextTokenizer | None, prompt: Any, name: str) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(_needed(tokenizer, name).encode(prompt))
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if (
        isinstance(prompt, Sequence)
        and len(prompt)
        and all(isinstance(message, Mapping) for message in prompt)
    ):
        return tuple(_needed(tokenizer, name).encode_chat(prompt))
    try:
        return tuple(operator.index(token) for token in prompt)
    except TypeError:
        raise GenerationError(
            f"{name} must be text, a flat list of token ids, or a list of chat messages; "
            f"got {prompt!r:.80}"
        ) from None


def _needed(tokenizer: TextTokenizer | None, name: str) -> TextTokenizer:
    if tokenizer is None:
        raise GenerationError(f"{name} is text, which needs a tokenizer; pass token ids")
    return tokenizer
