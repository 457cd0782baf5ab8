"""Text from token ids as they come."""

from __future__ import annotations

import operator
import re
from typing import Any

import tokenizers

from fp4jax.errors import TokenizerError


class StreamingDetokenizer:
    """Turns ids into text as they come. All pieces joined are what ``decode`` gives for all ids.

    A piece holds complete characters only: bytes that may be the start of a character wait for
    the rest. Only the last few tokens are decoded anew for each id, so cost does not grow with
    the length of the text.

    Args:
      backend: of the ``tokenizers`` library.
      skip_special_tokens: leave special tokens out.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, skip_special_tokens: bool = False) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        added = backend.get_added_tokens_decoder() if skip_special_tokens else {}
        self._skipped = frozenset(i for i, token in added.items() if token.special)
        # A decoder may treat the first token in its own way (no leading space), so tokens whose
        # text is out already stay in front of the new ones: ids[:shown], with the text `context`.
        self._ids: list[int] = []
        self._shown = 0
        self._context = ""

    def add(self, token_id: int, /) -> str:
        """Text that ``token_id`` completes, often its own, sometimes none.

        Raises:
          TokenizerError: not a non-negative integer.
        """
        token_id = check_id(token_id)
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        # A run of byte tokens (<0xE2> <0x82> <0xAC>) is read as a whole, right up to its end.
        if _is_byte(token):
            return ""
        text = self._decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        return self._show(text)

    def flush(self) -> str:
        """The rest of the text, incomplete characters as U+FFFD; then starts afresh."""
        piece = self._show(self._decode(self._ids))
        self._ids, self._shown, self._context = [], 0, ""
        return piece

    def _show(self, text: str) -> str:
        piece = text[len(self._context) :]
        if piece:
            self._ids = self._ids[self._shown :]
            self._shown = len(self._ids)
            self._context = self._decode(self._ids)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=self._skip)


def check_id(token: Any) -> int:
    """``token`` as an int.

    Raises:
      TokenizerError: not a non-negative 32-bit integer.
    """
    try:
        found = operator.index(token)
    except TypeError:
        found = -1
    if not 0 <= found < 2**32:
        raise TokenizerError(f"token ids must be non-negative integers, found {token!r:.80}")
    return found


def _is_byte(token: str) -> bool:
    return re.fullmatch("<0x[0-9A-Fa-f]{2}>", token) is not None
