"""Sizes that compiled shapes are rounded up to, so that a new length seldom means a new compile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SMALLEST = 16


def bucket(size: int, *, limit: int | None = None, smallest: int = SMALLEST) -> int:
    """``size`` rounded up to a power of two or, from 64 on, the midpoint of two of them.

    16, 32, 64, 96, 128, 192, 256, 384, … wastes at most a half (a third from 96 on).

    Args:
      size: at least 0.
      limit: an upper bound for the result (the model's context) where ``size`` allows it.
      smallest: the first bucket, a power of two.
    """
    power = smallest
    while power < size:
        power *= 2
    middle = power // 4 * 3
    chosen = middle if power >= 128 and size <= middle else power
    return chosen if limit is None else min(chosen, max(limit, size))


def right_padded(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """i32 [batch, width]: each row's tokens, then zeros."""
    tokens = np.zeros((len(rows), width), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
    return tokens
