"""Which tokens of a text or a conversation stay, whatever comes after it.

Tokens at an end are not settled: "the end" and "the ending" share none but the first, a line break
may become one token with the next, and a chat template closes a message that was to go on. A cache
of unsettled tokens would fit hardly any prompt, and a running state cannot be taken back. So a few
continuations are tokenized, and what they have in common is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fp4jax.errors import GenerationError
from fp4jax.generation.requests import TextTokenizer

CONTINUATIONS = ("a", "1", ".", " a", "\na")
"""Texts that begin in all the ways that tokenizers tell apart."""

LONGEST_WORD = 64
"""Characters at the end that are left out where there is no space among them."""

CLOSED_ROLES = ("system", "developer", "assistant")
"""Whose messages are whole: a user's follows. Those of others may go on."""


def is_open(message: Mapping[str, Any]) -> bool:
    """Whether a message at the end of a conversation may go on."""
    return message.get("role") not in CLOSED_ROLES


def opening_tokens(tokenizer: TextTokenizer, prompt: Any) -> tuple[int, ...]:
    """:func:`opening_of_text` or :func:`opening_of_chat`, whichever ``prompt`` is.

    Raises:
      GenerationError: as they, or there is no such token.
    """
    text = isinstance(prompt, str)
    ids = opening_of_text(tokenizer, prompt) if text else opening_of_chat(tokenizer, prompt)
    if not ids:
        raise GenerationError(
            "the prompt is too short for a prompt cache: none of its tokens is sure to stay when "
            "more follows; give more of it, or token ids"
        )
    return ids


def opening_of_text(tokenizer: TextTokenizer, text: str) -> tuple[int, ...]:
    """Tokens that every text which begins with ``text`` begins with: all but the last word's."""
    return _settled(tokenizer.encode, text)


def opening_of_chat(
    tokenizer: TextTokenizer, messages: Sequence[Mapping[str, Any]]
) -> tuple[int, ...]:
    """Tokens that every conversation which begins with ``messages`` begins with.

    A user's or a tool's message at the end may go on, as :func:`opening_of_text`; after any other
    a user's follows.

    Raises:
      GenerationError: a message that may go on and is not text.
    """
    *before, last = messages
    content: Any = last.get("content")
    if not is_open(last):
        before, last, content = [*messages], {"role": "user"}, ""
    if not isinstance(content, str):
        raise GenerationError(
            f"the content of the last message must be text for a prompt cache, got {content!r:.80}"
        )
    return _settled(
        lambda text: tokenizer.encode_chat([*before, {**last, "content": text}]), content
    )


def prompt_json(prompt: Any) -> str:
    """Text or messages as JSON; null for token ids."""
    if isinstance(prompt, str):
        return json.dumps(prompt)
    if is_chat(prompt):
        return json.dumps(list(prompt), default=dict)
    return json.dumps(None)


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is messages."""
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) for message in prompt)
    )


def _settled(encode: Callable[[str], Sequence[int]], text: str) -> tuple[int, ...]:
    """What the tokens of all texts that begin with ``text`` begin with.

    A space divides words for every tokenizer, a line break for most of them; all words but the
    last, with the space before it, are settled. So ``text`` is also tried without that one, and
    where there is none before it, as if there were no text. One token more is left out: whatever
    comes next may become part of it.
    """
    stem = text.rstrip()
    kept = stem[: max(stem.rfind(" "), len(stem) - LONGEST_WORD, 0)].rstrip()
    texts = [kept] if kept else [*CONTINUATIONS]
    if text:
        texts += [text, *(text + more for more in CONTINUATIONS)]
    first, *others = (encode(text) for text in texts)
    length = len(first)
    for other in others:
        same = [a == b for a, b in zip(first[:length], other, strict=False)]
        length = same.index(False) if False in same else len(same)
    return tuple(first[: max(length - 1, 0)])
