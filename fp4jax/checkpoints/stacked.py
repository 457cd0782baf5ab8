"""Experts that a checkpoint stores as stacked tensors, seen one by one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from fp4jax.checkpoints.stored import DENSE_DTYPES
from fp4jax.checkpoints.tensors import TensorFiles, TensorInfo

STACKED = (
    (".experts.gate_up_proj", ("gate_proj", "up_proj")),
    (".experts.up_proj", ("up_proj",)),
    (".experts.down_proj", ("down_proj",)),
)
"""Name endings of ``[E, N, K]`` tensors, and the linears that share N, in order."""


def unstack_experts(files: TensorFiles) -> TensorFiles:
    """``files`` with each stacked, unquantized expert tensor replaced by its matrices.

    ``….experts.gate_up_proj`` ``[E, 2 N, K]`` becomes ``….experts.0.gate_proj.weight`` ``[N, K]``
    and so on: the names that quantizing tools write, and that key tables use. No data is moved;
    the entries are spans of the stored tensor. Everything else is left as it is.
    """
    infos: dict[str, TensorInfo] = {}
    for name in files.names():
        info = files.info(name)
        parts = next((parts for ending, parts in STACKED if name.endswith(ending)), None)
        dense = len(info.shape) == 3 and info.dtype in DENSE_DTYPES
        if parts is None or not dense or info.shape[1] % len(parts):
            infos[name] = info
        else:
            infos |= {span.name: span for span in _spans(info, parts)}
    return TensorFiles(files.root, infos)


def _spans(info: TensorInfo, parts: tuple[str, ...]) -> Iterator[TensorInfo]:
    experts, n, k = info.shape
    shape = (n // len(parts), k)
    nbytes = math.prod(shape) * info.dtype.itemsize
    parent = info.name.rpartition(".")[0]
    names = (f"{parent}.{e}.{part}.weight" for e in range(experts) for part in parts)
    for i, name in enumerate(names):
        yield dataclasses.replace(info, name=name, shape=shape, offset=info.offset + i * nbytes)
