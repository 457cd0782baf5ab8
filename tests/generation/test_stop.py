"""Stop strings against a character-by-character search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4jax.generation.stop import RowText, StopStrings


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Reference: the first end of a prefix at which some stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def held(text: str, stops: list[str]) -> int:
    return max(
        (n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])),
        default=0,
    )


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("abé", max_size=4), max_size=8),
    stops=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3, unique=True),
)
def test_any_cut_into_pieces_gives_the_same(pieces, stops):
    expected, hit = cut("".join(pieces), stops)
    stop, shown, fed = StopStrings(stops), "", ""
    for piece in pieces:
        shown, fed = shown + stop.feed(piece), fed + piece
        if cut(fed, stops)[1] is None:  # nothing too early, nothing held without need
            assert shown == fed[: len(fed) - held(fed, stops)]
    assert shown + stop.flush() == expected
    assert stop.hit == hit


@pytest.mark.parametrize(
    ("stops", "pieces", "text"),
    [
        (["END"], ["xE", "N", "D", "y"], "x"),
        (["END"], ["xE", "N", "E", "Q"], "xENEQ"),
        (["aab"], ["a", "a", "a", "b"], "a"),
        (["ab", "abc"], ["abc"], ""),
        (["bcd", "c"], ["abcd"], "ab"),
        (["c", "abc"], ["zabc"], "z"),
        (["\n\n"], ["a\n", "b\n", "\n"], "a\nb"),
        (["€é"], ["1€", "€", "é2"], "1€"),
        ([], ["ab", "c"], "abc"),
    ],
)
def test_cases(stops, pieces, text):
    stop = StopStrings(stops)
    assert "".join([stop.feed(p) for p in pieces]) + stop.flush() == text


class Letters:
    """Token i is the i-th letter; its flush completes what an unfinished character would."""

    def __init__(self, rest=""):
        self.rest = rest

    def add(self, token):
        return chr(ord("a") + token)

    def flush(self):
        return self.rest


def run(row: RowText, tokens):
    pieces = []
    for token in tokens:
        pieces.append(row.add(token))
        if pieces[-1].finish_reason:
            break
    return "".join(p.text for p in pieces), [p.finish_reason for p in pieces]


def test_rows_end_by_id_string_or_length():
    assert run(RowText(Letters(), [], [3], 9), [0, 1, 3, 2]) == ("ab", [None, None, "stop"])
    assert run(RowText(Letters(), ["bc"], [], 9), [0, 1, 2, 3]) == ("a", [None, None, "stop"])
    assert run(RowText(Letters(), ["bx"], [], 2), [0, 1, 2]) == ("ab", [None, "length"])
    # A stop string completed by the very last token, and one by the detokenizer's rest.
    assert run(RowText(Letters(), ["bc"], [], 3), [0, 1, 2]) == ("a", [None, None, "stop"])
    assert run(RowText(Letters("c"), ["bc"], [], 2), [0, 1]) == ("a", [None, "stop"])
    # Text held back comes out when a stop id ends the row.
    assert run(RowText(Letters("!"), ["bx"], [4], 9), [0, 1, 4]) == ("ab!", [None, None, "stop"])
    assert run(RowText(None, [], [4], 9), [0, 4]) == ("", [None, "stop"])
