"""Look-alikes of ES001: all of this passes."""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import re
import types
from types import MappingProxyType

import numpy as np
import pytest

__all__ = ["Sampler", "lookup"]

logger = logging.getLogger(__name__)
ANNOTATED_ONLY: dict[str, int]
NAMES = ("a", "b")
DTYPES = MappingProxyType({"bf16": 2, "f32": 4})
TYPES = types.MappingProxyType(dict(a=1))  # noqa: C408
WORDS = frozenset({"a", "b"})
MORE_WORDS = WORDS | {"c"}
SQUARES = tuple(n * n for n in range(4))
SORTED = tuple(sorted(["b", "a"]))
SUM = sum([1, 2, 3])
JOINED = "-".join(["a", "b"])
PATTERN = re.compile("[a-z]+")
E2M1 = np.array([0, 0.5, 1, 1.5], np.float32)

# Literal tables that every use in the file plainly reads.
TABLE = {"a": 1, "b": 2}
CASES = [(1, 2), (3, 4)]
OPTIONS = {"temp": 0.5, "seed": 1}
SHADOWED = {"a": 1}


@pytest.mark.parametrize("pair", CASES)
def lookup(pair, key="a", fallback=None, *rest):
    for name, value in TABLE.items():
        logger.info("%s %s", name, value)
    total = len(CASES) + TABLE[key] + (TABLE.get(key) or 0)
    if key in TABLE and TABLE:
        total += sum(value for value in TABLE.values())
    merged = {**OPTIONS, "seed": 2}
    options = dict(**OPTIONS)
    return total, merged, options, tuple(CASES), f"{TABLE}", [*CASES, pair]


def shadows(key):
    SHADOWED = {}
    SHADOWED[key] = 1
    return SHADOWED


def local_state(items):
    seen, found = {}, []
    for item in items:
        seen[item] = item
        found.append(item)

    def note(item):
        seen[item] = item

    note(1)
    return [lambda event: found.append(event)], seen


def counting():
    total = 0

    def step():
        nonlocal total
        total += 1
        return total

    return step


def wrap(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args)

    wrapper.__wrapped__ = fn
    return wrapper


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Sampler:
    __slots__ = ["a", "table"]

    table: dict[str, int] = dataclasses.field(default_factory=dict)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        def put(name, value):
            object.__setattr__(self, name, value)

        put("names", tuple(self.names))


class Queue:
    def __init__(self) -> None:
        self.items: list[int] = []

    def push(self, item: int) -> None:
        self.items.append(item)


GREEDY = Sampler()


def uses_local_instance():
    queue = Queue()
    queue.push(1)
    queue.limit = 3
    return queue


if __name__ == "__main__":
    results = []
    for number in range(3):
        results.append(number)
