"""W4A16 matmul as a Pallas kernel for NVIDIA GPUs (Triton backend).

The kernel itself is imported when it is first needed: a JAX without this backend of Pallas must
still be able to import the op.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp4jax.marlin import K_MULTIPLE, LAYOUT, MarlinWeight
from fp4jax.ops.dispatch import KERNEL_PLATFORM, MatmulSpec

MOST_ROWS = 1024
"""Beyond these rows decoding once and one dense matmul is faster (measured on an H200)."""

OLD_DEVICES = ("Tesla", "Quadro", "TITAN", "GTX", "RTX 20", "V100", "P100", "T4")
"""Parts of device kinds of compute capability 7.5 and less, whose units have no bf16."""


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How a kernel is cut. Static.

    Attributes:
      block_m: rows of x a program, a power of two from 16.
      block_n: output features a program, a power of two from 64.
      tiles: layout tiles (64 k) a step, a power of two.
      split_k: programs that share one output tile; their f32 sums are added in order.
      warps: warps a program.
      stages: depth of the load pipeline.
    """

    block_m: int
    block_n: int
    tiles: int
    split_k: int
    warps: int
    stages: int


def tile_shape(rows: int, x_dtype) -> TileConfig:
    """The shape of a program for ``rows`` rows of x a matrix; K is not split yet.

    Measured on one H200. None needs more than the 99 KB of shared memory that a program has on
    consumer GPUs (105 KB where a program has 227).
    """
    if jnp.dtype(x_dtype) == jnp.float32:
        shape = (16, 64, 4) if rows <= 16 else (64, 64, 1)
    elif rows <= 32:
        shape = (16 if rows <= 16 else 32, 64, 4)
    else:
        shape = (64, 128, 2) if rows <= 64 else (128, 64, 2)
    return TileConfig(*shape, split_k=1, warps=4, stages=3)


def split_k(config: TileConfig, programs: int, k: int) -> TileConfig:
    """``config`` with K split until there are enough programs to fill a GPU.

    Args:
      programs: how many there are without a split.
      k: input features; each part keeps two steps or more.
    """
    enough = 512 if config.block_m == 16 else 256
    steps, split = -(-k // (K_MULTIPLE * config.tiles)), 1
    while programs * split < enough and steps >= 4 * split:
        split *= 2
    return dataclasses.replace(config, split_k=split)


def unsupported_reason(spec: MatmulSpec) -> str | None:
    """Why the kernel cannot serve ``spec``, or None."""
    if spec.platform != KERNEL_PLATFORM:
        return f"it is a kernel for NVIDIA GPUs (cuda) and the platform is {spec.platform}"
    if spec.layout != LAYOUT:
        return f"it reads layout {LAYOUT} and the weight has layout {spec.layout}"
    if any(name in (spec.device_kind or "") for name in OLD_DEVICES):
        return f"it needs compute capability 8.0 or higher, which {spec.device_kind} has not"
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return f"JAX {jax.__version__} has no Triton backend in Pallas"
    return None


def slower_reason(spec: MatmulSpec) -> str | None:
    """Why another implementation serves ``spec`` faster, or None."""
    # The f32 form keeps its lead: XLA's alternative there has no matrix units.
    if spec.m > MOST_ROWS and spec.x_dtype != "float32":
        return f"over {MOST_ROWS} rows (M = {spec.m}) decoding once and a dense matmul are faster"
    return None


def tile_config(m: int, n: int, k: int, x_dtype) -> TileConfig:
    """How :func:`matmul_triton` cuts ``[m, k] @ [k, n]``."""
    config = tile_shape(m, x_dtype)
    programs = -(-m // config.block_m) * -(-n // config.block_n)
    return split_k(config, programs, k)


def matmul_triton(
    x: Float[Array, "m k"],
    w: MarlinWeight,
    *,
    bias: Float[Array, " n"] | None = None,
    out_dtype,
    config: TileConfig | None = None,
    interpret: bool = False,
) -> Float[Array, "m n"]:
    """``x @ w.T (+ bias)``, accumulated in f32, cast once at the end.

    Args:
      x: bf16, f16 or f32; f32 is multiplied in three exact bf16 parts.
      w: one matrix (no stack).
      bias: added in f32, after the global scale.
      out_dtype: dtype of the result.
      config: how to cut the work; :func:`tile_config`'s choice by default.
      interpret: run in JAX's interpreter, on any backend.
    """
    from fp4jax.ops.w4a16_matmul import triton_kernel

    config = config or tile_config(x.shape[0], w.n, w.k, x.dtype)
    return triton_kernel.dense_call(x, w, bias, out_dtype, config, interpret)
