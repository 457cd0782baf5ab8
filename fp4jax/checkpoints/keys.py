"""The declarative key table: which checkpoint tensors fill which node of the parameter tree.

A model lists its keys once; the loader sees to it that every tensor of a checkpoint is used by
exactly one of them or skipped for a stated reason. Sources are module names as a text model's
checkpoint spells them (``model.…``); other prefixes are found by the loader. How a matrix is
stored (NVFP4 of either vendor, bf16, …) is not said here: the tensors say it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Key:
    """One node of the parameter tree and the checkpoint modules it is made of.

    Attributes:
      target: path of the module in the tree, ``/`` between names.
      kind: "vector" (a 1-D ``weight``), "parameter" (a tensor of its own), "matrix" (one or several
        fused linears), "head" (a matrix that a tied model has none of) or "experts" (a stack of
        matrices).
      sources: checkpoint module names, one a fused shard; of "experts", with ``{expert}`` in it;
        of a "parameter", the tensor's own name.
      rows: output features of each shard; of a vector, its length; of a parameter, its shape.
      k: input features; 0 for a vector or a parameter.
      experts: matrices in the stack, 0 where there is none.
      bias: whether the config says that the linears have biases; None where it says nothing.
    """

    target: str
    kind: str
    sources: tuple[str, ...]
    rows: tuple[int, ...]
    k: int = 0
    experts: int = 0
    bias: bool | None = None

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Last component of each source: what a shard is called in the tree."""
        return tuple(source.rsplit(".", 1)[-1] for source in self.sources)


@dataclasses.dataclass(frozen=True)
class Skip:
    """Tensors that are left out on purpose.

    Attributes:
      pattern: regular expression that the whole tensor name matches.
      reason: why, for people.
    """

    pattern: str
    reason: str


def vector(target: str, source: str, size: int) -> Key:
    """A norm's weight ``[size]``."""
    return Key(target, "vector", (source,), (size,))


def parameter(target: str, source: str, *shape: int) -> Key:
    """Tensor ``source`` in its own dtype and ``shape``: what an f32 computation reads."""
    return Key(target, "parameter", (source,), shape)


def linear(target: str, source: str, n: int, k: int, bias: bool | None = None) -> Key:
    """A linear's or an embedding's matrix ``[n, k]``; a bias beside it is taken along."""
    return Key(target, "matrix", (source,), (n,), k, bias=bias)


def fused(
    target: str, parent: str, shards: Mapping[str, int], k: int, bias: bool | None = None
) -> Key:
    """Several linears of one input, children of ``parent``, as one matrix ``[sum, k]``."""
    sources = tuple(f"{parent}.{name}" for name in shards)
    return Key(target, "matrix", sources, tuple(shards.values()), k, bias=bias)


def head(target: str, source: str, n: int, k: int) -> Key:
    """The output head ``[n, k]``, absent from a checkpoint that ties it to the embedding."""
    return Key(target, "head", (source,), (n,), k)


def experts(target: str, parent: str, shards: Mapping[str, int], k: int, count: int) -> Key:
    """Matrices ``parent.<expert>.<shard>`` as one stack ``[count, sum, k]``."""
    sources = tuple(f"{parent}.{{expert}}.{name}" for name in shards)
    return Key(target, "experts", sources, tuple(shards.values()), k, count)
