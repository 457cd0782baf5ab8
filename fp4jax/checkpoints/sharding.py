"""Where each node of a parameter tree lies on a mesh.

Tensor parallelism by JAX's own means: a node is split over one mesh axis where its tiles divide,
and the compiler inserts the collectives. Projections that write the residual stream are split
along K (16-element scale groups stay whole: a 64-k tile is 16 words) where that divides, all
others along N; what divides neither way is on every device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp4jax.fp8 import FP8Weight
from fp4jax.marlin import MarlinWeight

AXIS_NAMES = ("model", "tensor", "tp")
"""Mesh axes that weights are split over, first found first; else the mesh's last axis."""

ROW_PARALLEL = ("o_proj", "out_proj", "down_proj")
"""Modules split along their input features."""

WORD_TILE = 16
SCALE_TILE = 4


def tensor_axis(mesh: Mesh) -> str:
    """The mesh axis that weights are split over."""
    return next((name for name in AXIS_NAMES if name in mesh.axis_names), mesh.axis_names[-1])


def place(node: Any, path: tuple[str, ...], mesh: Mesh | None) -> Any:
    """``node`` spread over ``mesh`` as its path in the tree says; unchanged without a mesh.

    Args:
      node: an array, a :class:`MarlinWeight` or an :class:`FP8Weight`.
      path: names from the root of the tree.
      mesh: any mesh; one axis of it is used.
    """
    if mesh is None:
        return node
    axis = tensor_axis(mesh)
    size = mesh.shape[axis]

    def put(array: jax.Array, dim: int | None) -> jax.Array:
        spec: list[str | None] = [None] * array.ndim
        if dim is not None:
            spec[dim] = axis
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    def split_dim(*tiled: tuple[jax.Array, int]) -> int | None:
        """K where the path says so and it divides, else N where that divides, else None."""
        fits = {
            -1: all(array.shape[-1] % (size * tile) == 0 for array, tile in tiled),
            -2: all(array.shape[-2] % size == 0 for array, _ in tiled),
        }
        along_k = len(path) > 1 and path[-2] in ROW_PARALLEL
        order = (-1, -2) if along_k else (-2,)
        return next((dim for dim in order if fits[dim]), None)

    if isinstance(node, MarlinWeight):
        dim = split_dim((node.words, WORD_TILE), (node.scales, SCALE_TILE))
        return dataclasses.replace(
            node,
            words=put(node.words, dim),
            scales=put(node.scales, dim),
            global_scale=put(node.global_scale, None),
            fingerprint=put(node.fingerprint, None),
        )
    if isinstance(node, FP8Weight):
        dim = split_dim((node.values, 1))
        return dataclasses.replace(
            node,
            values=put(node.values, dim),
            scale=put(node.scale, -1 if dim == -2 else None),
            fingerprint=put(node.fingerprint, None),
        )
    return put(node, split_dim((node, 1)) if node.ndim >= 2 else None)
