"""From tokens to text: stop strings across token boundaries, and nothing shown too early."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any


class StopStrings:
    """Cuts a text, given in pieces, where a stop string is completed first.

    Text that could still become a stop string is held back. What is emitted does not depend on how
    the text is cut into pieces: of several matches the one that ends first counts, and of those
    that end together the longest.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Text that is safe to show now; :attr:`hit` tells whether a stop string was completed."""
        if self.hit is not None:
            return ""
        pending = self._held + text
        found = [(pending.find(s) + len(s), -len(s), s) for s in self._strings if s in pending]
        if found:
            end, _, self.hit = min(found)
            self._held = ""
            return pending[: end - len(self.hit)]
        keep = self._unfinished(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """The text still held back; the end of the text has come, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _unfinished(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = min(max((len(s) for s in self._strings), default=1) - 1, len(text))
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(s.startswith(end) for s in self._strings):
                return length
        return 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one token adds. ``finish_reason`` is None while the row goes on."""

    text: str
    finish_reason: str | None = None


class RowText:
    """Text of one row, token by token: detokenizer, stop ids, stop strings, length.

    Streaming and batch calls both read their text through this class, so they cannot differ.

    Args:
      detokenizer: ``add(id) -> str`` and ``flush() -> str``, or None for ids alone.
      stop: stop strings.
      stop_ids: ids that end the row; they add no text.
      max_tokens: tokens after which the row ends with "length".
    """

    def __init__(
        self, detokenizer: Any, stop: Sequence[str], stop_ids: Iterable[int], max_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop)
        self._stop_ids = frozenset(stop_ids)
        self._max_tokens = max_tokens
        self.count = 0
        self.finish_reason: str | None = None

    def add(self, token: int) -> Piece:
        """What ``token`` adds; the last piece of a row includes all text held back."""
        self.count += 1
        text = ""
        if token in self._stop_ids:
            self.finish_reason = "stop"
        elif self._detokenizer is not None:
            text = self._stop.feed(self._detokenizer.add(token))
        if self.finish_reason is None and self.count >= self._max_tokens:
            self.finish_reason = "length"
        if self._stop.hit is None and self.finish_reason is not None:
            text += self._rest()
        if self._stop.hit is not None:
            self.finish_reason = "stop"
        return Piece(text, self.finish_reason)

    def _rest(self) -> str:
        if self._detokenizer is None:
            return ""
        return self._stop.feed(self._detokenizer.flush()) + self._stop.flush()
