"""What is in a checkpoint and what would serve it, from headers alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fp4jax import marlin
from fp4jax.checkpoints.compressed_tensors import COMPRESSED_TENSORS
from fp4jax.checkpoints.plan import PlannedNode
from fp4jax.checkpoints.stored import DENSE, FP8
from fp4jax.loading import OpenedCheckpoint, compute_dtype, open_checkpoint
from fp4jax.nvfp4 import BLOCK_SIZE, NVFP4Weight
from fp4jax.ops.w4a16_grouped_matmul import explain_grouped
from fp4jax.ops.w4a16_matmul import explain

DECODE_ROWS, PREFILL_ROWS = 1, 512
"""Rows of x for which :attr:`InspectedNode.kernel` is asked."""


@dataclasses.dataclass(frozen=True)
class InspectedNode:
    """One node of the parameter tree, or several alike.

    Attributes:
      path: in the tree; ``layers_0-29`` stands for a run of layers.
      format: "NVFP4 modelopt", "NVFP4 compressed-tensors", "FP8" or a dtype.
      shape: logical, of one node.
      nbytes: in the checkpoint, of all of them.
      kernel: implementation of its matmul; where decode and prefill differ, both.
      count: how many nodes the entry stands for.
    """

    path: str
    format: str
    shape: tuple[int, ...]
    nbytes: int
    kernel: str
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A checkpoint seen from outside.

    Attributes:
      path: its folder.
      architecture: as its config names it.
      config: the frozen config.
      quantization: method and algorithms, as the config states them.
      nodes: of the parameter tree.
      skipped: (tensor, reason) of those left out on purpose.
      warnings: contradictions between config and tensors.
    """

    path: str
    architecture: str
    config: Any
    quantization: str
    nodes: tuple[InspectedNode, ...]
    skipped: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are used."""
        return sum(node.nbytes for node in self.nodes)

    def collapsed(self) -> tuple[InspectedNode, ...]:
        """:attr:`nodes` with those that differ in their layer only merged into one entry."""
        return tuple(_collapse(self.nodes))


def inspect_checkpoint(path: str | Path, *, dtype: Any = None) -> Inspection:
    """Reads a checkpoint's configuration and headers; no weights, no device memory.

    Args:
      path: checkpoint folder.
      dtype: of activations, as in ``fp4jax.load``; the choice of kernel depends on it.

    Raises:
      Fp4JaxError: as ``fp4jax.load`` would, for what can be told from configuration and headers.
    """
    compute = compute_dtype(dtype)
    opened = open_checkpoint(path)
    stated = opened.quantization
    return Inspection(
        path=str(opened.files.root),
        architecture=opened.architecture.name,
        config=opened.config,
        quantization=f"{stated.method}: {', '.join(stated.algorithms)}"
        if stated.method
        else "none stated",
        nodes=tuple(_node(node, compute, opened) for node in opened.plan.nodes),
        skipped=tuple((info.name, reason) for info, reason in opened.plan.skipped),
        warnings=opened.plan.warnings,
    )


def _node(node: PlannedNode, dtype: jnp.dtype, opened: OpenedCheckpoint) -> InspectedNode:
    return InspectedNode(
        path="/".join(node.path),
        format=_format(node, dtype),
        shape=node.shape,
        nbytes=node.nbytes,
        kernel=_kernel(node, dtype, opened.config.tie_word_embeddings),
    )


def _format(node: PlannedNode, dtype: jnp.dtype) -> str:
    if node.format == DENSE:
        return node.tensors[0].dtype.name if node.tensors else dtype.name
    return "FP8" if node.format == FP8 else f"NVFP4 {node.format}"


def _kernel(node: PlannedNode, dtype: jnp.dtype, tied: bool) -> str:
    if not node.matrices:
        return "-"
    if node.path[0] == "embed_tokens" and not tied:
        return "gather"
    also = "gather, " if node.path[0] == "embed_tokens" else ""
    if node.format == DENSE:
        return f"{also}xla dot"
    if node.format == FP8:
        return f"{also}xla FP8 {'loop' if node.stacked else 'dot'}"
    weight = repacked_shape(node)
    ask = explain_grouped if node.stacked else explain
    choices = [
        str(ask(jax.ShapeDtypeStruct((rows, node.k), dtype), weight).choice)
        for rows in (DECODE_ROWS, PREFILL_ROWS)
    ]
    op = "grouped " if node.stacked else ""
    return f"{also}{op}{' / '.join(dict.fromkeys(choices))}"


def repacked_shape(node: PlannedNode) -> marlin.MarlinWeight:
    """The repacked weight that a planned NVFP4 node becomes, shapes in place of arrays."""
    stack = (len(node.matrices),) if node.stacked else ()
    shape: Any = jax.ShapeDtypeStruct  # stands where the annotations say array
    shards = tuple(
        NVFP4Weight(
            packed=shape((*stack, rows, node.k // 2), jnp.uint8),
            scale=shape((*stack, rows, node.k // BLOCK_SIZE), jnp.float8_e4m3fn),
            global_scale=shape(stack, jnp.float32),
            global_is_divisor=node.format == COMPRESSED_TENSORS.name,
        )
        for rows in node.rows
    )
    found: marlin.MarlinWeight = jax.eval_shape(marlin.repack, shards)
    return found


def _collapse(nodes: Iterable[InspectedNode]) -> Iterable[InspectedNode]:
    groups: dict[tuple[Any, ...], list[tuple[int, InspectedNode]]] = {}
    for node in nodes:
        found = re.match(r"layers_(\d+)(/.*)", node.path)
        layer, rest = (int(found[1]), found[2]) if found else (-1, node.path)
        key = (layer >= 0, rest, node.format, node.shape, node.kernel)
        groups.setdefault(key, []).append((layer, node))
    for (in_layer, rest, *_), members in groups.items():
        first = members[0][1]
        path = f"layers_{_ranges([layer for layer, _ in members])}{rest}" if in_layer else rest
        total = sum(node.nbytes for _, node in members)
        yield dataclasses.replace(first, path=path, nbytes=total, count=len(members))


def _ranges(numbers: list[int]) -> str:
    """``0-3,5`` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
