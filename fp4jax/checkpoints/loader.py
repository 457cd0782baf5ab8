"""Filling a parameter tree from a planned checkpoint, one node at a time.

Each node is read to the host, put on its device, repacked there, and waited for before the next
one is read, so that the device never holds more than the final tree plus what one repack needs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax import marlin
from fp4jax.checkpoints.plan import Plan, PlannedNode
from fp4jax.checkpoints.sharding import place
from fp4jax.checkpoints.stored import DENSE, FP8, check_matrix, read_fp8, read_nvfp4
from fp4jax.checkpoints.tensors import TensorFiles
from fp4jax.fp8 import FP8Weight, make_fp8, row_scales
from fp4jax.nvfp4 import NVFP4Weight
from fp4jax.progress import Progress


def check_values(files: TensorFiles, plan: Plan) -> None:
    """Reads every scale (and FP8 values) and refuses bad ones, before a device holds anything.

    Raises:
      FormatError: naming file, module and index.
    """
    for node in plan.nodes:
        for group in node.matrices:
            for matrix in group:
                check_matrix(files, matrix)


def load_params(
    files: TensorFiles,
    plan: Plan,
    *,
    dtype: jnp.dtype,
    mesh: jax.sharding.Mesh | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The parameter tree.

    Args:
      files: the checkpoint.
      plan: from :func:`fp4jax.checkpoints.plan.make_plan`.
      dtype: of activations. Unquantized tensors are kept in it, or in the checkpoint's own 16-bit
        dtype where that is narrower (they are widened where they are used, which is exact).
      mesh: spread the weights over it; None keeps them on the default device.
      progress: told about bytes read.

    Returns:
      Nested dicts; leaves are arrays and quantized weights (:mod:`fp4jax.quantized`).
    """
    params: dict[str, Any] = {}
    done, total = 0, plan.nbytes
    for node in plan.nodes:
        value = place(_make(files, node, dtype), node.path, mesh)
        jax.block_until_ready(value)
        branch = params
        for name in node.path[:-1]:
            branch = branch.setdefault(name, {})
        branch[node.path[-1]] = value
        done += node.nbytes
        if progress is not None:
            progress("load", done, total)
    return params


def _make(files: TensorFiles, node: PlannedNode, dtype: jnp.dtype) -> Any:
    if node.parameter:
        return jax.device_put(files.read(node.tensors[0].name))
    if not node.matrices:
        parts = [
            np.zeros(rows, dtype) if info is None else files.read(info.name)
            for info, rows in zip(node.vectors, node.rows, strict=True)
        ]
        return jax.device_put(_join(parts, dtype))
    if node.format == DENSE:
        parts = [files.read(m.weight.name) for group in node.matrices for m in group]
        return jax.device_put(_join(parts, dtype).reshape(node.shape))
    if node.format == FP8:
        return _make_fp8(files, node)
    shards: list[NVFP4Weight] = []
    for i in range(len(node.rows)):
        stack = [read_nvfp4(files, group[i]) for group in node.matrices]
        shards.append(
            jax.tree.map(lambda *leaves: np.stack(leaves), *stack) if node.stacked else stack[0]
        )
    return _repack(tuple(shards))


def _make_fp8(files: TensorFiles, node: PlannedNode) -> FP8Weight:
    values, scales = [], []
    for group in node.matrices:
        read = [read_fp8(files, matrix) for matrix in group]
        values += [part for part, _ in read]
        scales.append(row_scales([scale for _, scale in read], node.rows))
    joined = values[0] if len(values) == 1 else np.concatenate(values)
    return make_fp8(
        jax.device_put(joined.reshape(node.shape)),
        jax.device_put(np.concatenate(scales).reshape(node.shape[:-1])),
    )


def _repack(shards: tuple[NVFP4Weight, ...]) -> marlin.MarlinWeight:
    on_device = jax.device_put(shards)
    packed = marlin.repack(on_device)
    jax.block_until_ready(packed)
    for leaf in jax.tree.leaves(on_device):
        leaf.delete()
    return packed


def _join(parts: list[np.ndarray], dtype: jnp.dtype) -> np.ndarray:
    """Parts in a row, in ``dtype``, unless all are stored alike and in fewer bits."""
    stored = {part.dtype for part in parts}
    if len(stored) > 1 or parts[0].dtype.itemsize >= dtype.itemsize:
        parts = [part.astype(dtype, copy=False) for part in parts]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
