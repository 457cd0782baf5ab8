"""The definitions that the other file seems to repeat."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar, overload

logger = logging.getLogger(__name__)
T = TypeVar("T")
_PRIVATE = 1

if TYPE_CHECKING:
    from os import PathLike

try:
    from fast import gemm
except ImportError:

    def gemm(x):
        return x


class Weight:
    repack = None


@overload
def repack(weight: int) -> int: ...
@overload
def repack(weight: str) -> str: ...
def repack(weight):
    return weight


if _PRIVATE:

    def branch():
        return 1
else:

    def branch():
        return 2


def wrapped(x):
    return x


wrapped = logging.lastResort or wrapped


def unsupported_reason(spec):
    return None


def main():
    Local = 1
    return Local, PathLike
