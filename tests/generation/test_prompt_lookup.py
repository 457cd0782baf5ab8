"""Prompt lookup against a search written in plain Python."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.errors import ConfigError
from fp4jax.generation.drafting import Drafter
from fp4jax.generation.prompt_lookup import PromptLookup


def reference(tokens: list[int], ngram: int, count: int) -> list[int]:
    """What followed the last occurrence of the longest end of ``tokens`` that occurs twice."""
    end = len(tokens)
    for size in range(min(ngram, end - 1), 0, -1):
        for begin in range(end - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[end - size :]:
                going = list(tokens)
                for i in range(count):
                    going.append(going[begin + size + i])
                return going[end:]
    return [tokens[-1]] * count


@functools.partial(jax.jit, static_argnames="drafter")
def propose(drafter, pieces, lengths, anchors):
    """Proposals after tokens fed in several right-padded pieces."""
    cache = drafter.init_cache(anchors.shape[0], 64, jnp.float32)
    for piece, length in zip(pieces, lengths, strict=True):
        cache = drafter.observe(None, cache, piece, (), length)
    return drafter.propose(None, None, None, anchors, cache, None).tokens


@pytest.mark.parametrize(("ngram", "block_size"), [(1, 2), (3, 8), (5, 4)])
def test_the_longest_and_last_match_is_continued(ngram, block_size):
    rng = np.random.default_rng(ngram)
    drafter = PromptLookup(ngram, block_size)
    matched = 0
    for vocab in (2, 3, 9, 40):
        rows = [rng.integers(0, vocab, n).tolist() for n in (1, 2, 7, 19, 30, 33)]
        cuts = [sorted(rng.integers(0, len(row), 2)) for row in rows]
        pieces = np.full((3, len(rows), 33), vocab - 1, np.int32)  # padding is a token like any
        lengths = np.zeros((3, len(rows)), np.int32)
        for b, (row, (i, j)) in enumerate(zip(rows, cuts, strict=True)):
            for k, piece in enumerate((row[:i], row[i:j], row[j:-1])):
                pieces[k, b, : len(piece)], lengths[k, b] = piece, len(piece)
        anchors = np.asarray([row[-1] for row in rows], np.int32)
        # Pieces of 33 need room behind the last one; 64 slots hold 31 + 33.
        found = propose(drafter, pieces, lengths, anchors)
        for row, proposals in zip(rows, np.asarray(found).tolist(), strict=True):
            assert proposals == reference(row, ngram, block_size - 1), row
            matched += row[-1] in row[:-1]
    assert matched > 8


def test_a_repetition_is_proposed_whole():
    """Its continuation runs into the end of the context and goes on with itself."""
    tokens = [7, 1, 2, 3, 1, 2, 3]
    found = propose(
        PromptLookup(3, 8),
        np.asarray([[tokens[:-1]]], np.int32),
        np.asarray([[6]], np.int32),
        np.asarray([3], np.int32),
    )
    assert found.tolist() == [[1, 2, 3, 1, 2, 3, 1]]


def test_values_are_checked():
    assert isinstance(PromptLookup(), Drafter)
    assert PromptLookup(2).with_block_size(5) == PromptLookup(2, 5)
    for options in ({"ngram": 0}, {"block_size": 1}, {"block_size": 2.0}, {"ngram": True}):
        with pytest.raises(ConfigError, match="must be a whole number"):
            PromptLookup(**options)
