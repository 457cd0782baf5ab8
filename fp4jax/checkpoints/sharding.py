"""Where each node of a parameter tree lies on a mesh.

Tensor parallelism by JAX's own means: a node is split over one mesh axis where its tiles divide,
and the compiler inserts the collectives. Projections that write the residual stream are split
along K (16-element scale groups stay whole: a 64-k tile is 16 words), all others along N.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp4jax.marlin import MarlinWeight

AXIS_NAMES = ("model", "tensor", "tp")
"""Mesh axes that weights are split over, first found first; else the mesh's last axis."""

ROW_PARALLEL = ("o_proj", "down_proj")
"""Modules split along their input features."""

WORD_TILE = 16
SCALE_TILE = 4


def tensor_axis(mesh: Mesh) -> str:
    """The mesh axis that weights are split over."""
    return next((name for name in AXIS_NAMES if name in mesh.axis_names), mesh.axis_names[-1])


def place(node: Any, path: tuple[str, ...], mesh: Mesh | None) -> Any:
    """``node`` spread over ``mesh`` as its path in the tree says; unchanged without a mesh.

    Args:
      node: an array or a :class:`MarlinWeight`.
      path: names from the root of the tree.
      mesh: any mesh; one axis of it is used.
    """
    if mesh is None:
        return node
    axis = tensor_axis(mesh)
    size = mesh.shape[axis]
    along_k = len(path) > 1 and path[-2] in ROW_PARALLEL

    def put(array: jax.Array, dim: int | None, tile: int = 1) -> jax.Array:
        spec: list[str | None] = [None] * array.ndim
        if dim is not None and array.shape[dim] % (size * tile) == 0:
            spec[dim] = axis
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    if isinstance(node, MarlinWeight):
        dim = -1 if along_k else -2
        return dataclasses.replace(
            node,
            words=put(node.words, dim, WORD_TILE if along_k else 1),
            scales=put(node.scales, dim, SCALE_TILE if along_k else 1),
            global_scale=put(node.global_scale, None),
            fingerprint=put(node.fingerprint, None),
        )
    if node.ndim < 2:
        return put(node, None)
    return put(node, -1 if along_k else -2)
