"""Imports, locals, loggers, fallbacks and an allowed protocol name repeat nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from es005_lookalikes import first
from es005_lookalikes.first import Weight

logger = logging.getLogger(__name__)
T = TypeVar("T")
_PRIVATE = 2
repack = first.repack

if TYPE_CHECKING:

    class branch: ...


try:
    from fast import gemm
except ImportError:

    def gemm(x):
        return x


# fp4jax: allow ES005 (asked of every backend by the dispatch)
def unsupported_reason(spec):
    return "never"


def user(wrapped):
    def repack(weight):
        return weight

    return repack, wrapped, Weight, gemm


def main():
    return user
