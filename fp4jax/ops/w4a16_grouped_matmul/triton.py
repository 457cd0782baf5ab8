"""Grouped W4A16 matmul as a Pallas kernel for NVIDIA GPUs (Triton backend).

The kernel itself is imported when it is first needed, as the plain op's is.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from fp4jax.marlin import MarlinWeight
from fp4jax.ops.dispatch import MatmulSpec
from fp4jax.ops.w4a16_matmul import triton as dense
from fp4jax.ops.w4a16_matmul.triton import TileConfig


def unsupported_reason(spec: MatmulSpec) -> str | None:
    """Why the kernel cannot serve ``spec``, or None."""
    return dense.unsupported_reason(spec)


def slower_reason(spec: MatmulSpec) -> str | None:
    """Never: the other implementation decodes whole matrices and loops over the experts."""
    del spec
    return None


def grouped_tile_config(t: int, e: int, n: int, k: int, x_dtype) -> TileConfig:
    """How :func:`grouped_matmul_triton` cuts ``t`` rows of ``e`` experts, spread evenly."""
    # Groups are uneven: blocks of over 64 rows were slower at any number of rows.
    config = dense.tile_shape(min(-(-t // e), 64), x_dtype)
    programs = most_tiles(t, e, config.block_m) * -(-n // config.block_n)
    return dense.split_k(config, programs, k)


def most_tiles(t: int, e: int, block_m: int) -> int:
    """The most row tiles that ``t`` rows in ``e`` groups, and a rest without one, can need."""
    groups = min(e + 1, t)  # as many as possible, with one row each; the other rows fill tiles
    return groups + (t - groups) // block_m


def grouped_matmul_triton(
    x: Float[Array, "t k"],
    w: MarlinWeight,
    group_sizes: Int[Array, " e"],
    *,
    out_dtype,
    config: TileConfig | None = None,
    interpret: bool = False,
) -> Float[Array, "t n"]:
    """Row t times the expert whose group holds it; rows past the last group are 0.

    Args:
      x: bf16, f16 or f32 rows sorted by expert; f32 is multiplied in three exact bf16 parts.
      w: a stack ``[E, N, K]``.
      group_sizes: i32, not negative.
      out_dtype: dtype of the result.
      config: how to cut the work; :func:`grouped_tile_config`'s choice by default.
      interpret: run in JAX's interpreter, on any backend.
    """
    from fp4jax.ops.w4a16_grouped_matmul import triton_kernel

    config = config or grouped_tile_config(x.shape[0], w.stack[0], w.n, w.k, x.dtype)
    return triton_kernel.grouped_call(x, w, group_sizes, out_dtype, config, interpret)
