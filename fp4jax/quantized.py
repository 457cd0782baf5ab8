"""What the kinds of quantized weight have in common: a node of the tree that carries its content's
checksum. Whoever walks a tree (identity, accounting, benchmarks) asks here; what to compute with a
node is decided in :mod:`fp4jax.layers.weights`.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

from jaxtyping import Array, UInt32

from fp4jax.fp8 import FP8Weight
from fp4jax.marlin import MarlinWeight


class QuantizedWeight(Protocol):
    """A quantized matrix ``[N, K]`` or a stack of them, immutable, as a pytree node."""

    @property
    def fingerprint(self) -> UInt32[Array, "*stack 4"]:
        """Checksum of the content."""

    @property
    def static_facts(self) -> tuple[Any, ...]:
        """What identifies the weight besides its fingerprint: layout, shape, conventions."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape ``[..., N, K]``."""

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading axes (experts)."""

    @property
    def n(self) -> int:
        """Output features."""

    @property
    def k(self) -> int:
        """Input features."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""


KINDS: tuple[type[QuantizedWeight], ...] = (MarlinWeight, FP8Weight)
"""Every kind there is."""


def is_quantized(node: Any) -> TypeGuard[QuantizedWeight]:
    """Whether ``node`` is a quantized weight: the ``is_leaf`` of a walk over a tree of weights."""
    return isinstance(node, KINDS)
