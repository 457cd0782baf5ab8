"""The seam between modules and stored weights.

A weight in the parameter tree is a node: a :class:`~fp4jax.marlin.MarlinWeight` where the
checkpoint is NVFP4, a :class:`~fp4jax.fp8.FP8Weight` where it is FP8, a plain array ``[N, K]``
where it is neither. Modules take what the tree holds and hand it to these functions; no module
keeps an array, and nothing but the tree says how a layer is stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp4jax import marlin
from fp4jax.fp8 import FP8Weight, take_fp8_rows
from fp4jax.marlin import MarlinWeight
from fp4jax.ops.dense_matmul import dense_matmul
from fp4jax.ops.dense_matmul.xla import dot_xla
from fp4jax.ops.grouped import loop_over_groups
from fp4jax.ops.row_blocks import slice_rows
from fp4jax.ops.varying import vary_alike
from fp4jax.ops.w4a16_grouped_matmul import w4a16_grouped_matmul
from fp4jax.ops.w4a16_matmul import w4a16_matmul
from fp4jax.ops.w8a16_matmul import w8a16_grouped_matmul, w8a16_matmul

Weight = MarlinWeight | FP8Weight | Array
"""What a linear's tree node can be."""


def has_variable(module: nn.Module, name: str) -> bool:
    """Whether the tree that ``module`` is applied to holds parameter ``name``."""
    return module.has_variable("params", name)


def variable(module: nn.Module, name: str, init: Callable[[Array], Weight]) -> Weight:
    """Parameter ``name``: the tree's node as it is, or, in ``init``, the result of ``init(key)``.

    ``Module.param`` would compare an existing node with the shape that ``init`` makes, but a node
    may be stored in another format than a fresh one.
    """
    if has_variable(module, name):
        return module.get_variable("params", name)
    return module.param(name, init)


def matmul(
    x: Float[Array, "*batch k"], weight: Weight, *, bias: Array | None = None, out_dtype=None
) -> Float[Array, "*batch n"]:
    """``x @ weight.T + bias``, f32 accumulation, in ``out_dtype`` (default ``x.dtype``)."""
    if isinstance(weight, MarlinWeight):
        return w4a16_matmul(x, weight, bias=bias, out_dtype=out_dtype)
    if isinstance(weight, FP8Weight):
        return w8a16_matmul(x, weight, bias=bias, out_dtype=out_dtype)
    return dense_matmul(x, weight, bias=bias, out_dtype=out_dtype)


def grouped_matmul(
    x: Float[Array, "tokens k"], weight: Weight, group_sizes: Int[Array, " experts"]
) -> Float[Array, "tokens n"]:
    """Rows of ``x``, sorted by expert, times their expert's matrix."""
    if isinstance(weight, MarlinWeight):
        return w4a16_grouped_matmul(x, weight, group_sizes)
    if isinstance(weight, FP8Weight):
        return w8a16_grouped_matmul(x, weight, group_sizes)
    return _grouped_multiply(x, weight, group_sizes).astype(x.dtype)


@functools.partial(jax.jit, inline=True)  # called by itself too, and then compiled once a shape
def _grouped_multiply(x: Array, weight: Array, group_sizes: Array) -> Array:
    return jax.lax.platform_dependent(
        x, weight, group_sizes, cpu=_grouped_dot_cpu, default=_grouped_dot
    )


def _grouped_dot(x: Array, weight: Array, group_sizes: Array) -> Array:
    return jax.lax.ragged_dot(
        x,
        weight.astype(x.dtype).swapaxes(-1, -2),
        group_sizes,
        preferred_element_type=jnp.float32,
        precision=matmul_precision(x.dtype),
    )


def _grouped_dot_cpu(x: Array, weight: Array, group_sizes: Array) -> Array:
    # The CPU backend's own ragged_dot multiplies every row with every expert.
    x, weight, group_sizes = vary_alike(x, weight, group_sizes)

    def matrix(e: Array) -> Array:
        return slice_rows(weight, e, 1)[0].astype(x.dtype)

    return loop_over_groups(x, group_sizes, weight.shape[1], matrix, dot_xla, jnp.float32)


def embed(
    weight: Weight, ids: Int[Array, "*batch"], dtype: jnp.dtype
) -> Float[Array, "*batch hidden"]:
    """Rows of an embedding table, quantized or not. Ids out of range are clamped."""
    if isinstance(weight, MarlinWeight):
        return marlin.take_rows(weight, ids, dtype)
    if isinstance(weight, FP8Weight):
        return take_fp8_rows(weight, ids, dtype)
    # The barrier keeps the compiler from widening the whole table once, outside of a generation
    # loop, and holding that copy.
    held: tuple[Array, Array] = jax.lax.optimization_barrier((weight, ids))
    return jnp.take(*held, axis=0, mode="clip").astype(dtype)


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """f32 means f32: no tf32 or bf16 passes on accelerators."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def random_dense(key: Array, n: int, k: int, dtype: jnp.dtype) -> Float[Array, "n k"]:
    """A random unquantized matrix with entries of standard deviation ``k ** -0.5``."""
    return (jax.random.normal(key, (n, k)) * k**-0.5).astype(dtype)


def random_quantized(shards: Sequence[int], k: int, stack: Sequence[int] = ()):
    """An initializer that makes a random repacked weight (see :func:`marlin.random_weight`)."""
    return lambda key: marlin.random_weight(key, shards, k, stack)
