"""The grouped op's Pallas (Triton) kernel.

Each group is cut into tiles of ``block_m`` rows, the rows past the last group into tiles that
store 0. How many tiles there are depends on the data, so the grid holds the most that can be;
every program finds its own tile from the group sizes and those without one do nothing. A row is
in one tile, so each result is stored once, by a program that reads no other group's rows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, Int32

from fp4jax.marlin import MarlinWeight
from fp4jax.ops.varying import vary_alike
from fp4jax.ops.w4a16_grouped_matmul.triton import most_tiles
from fp4jax.ops.w4a16_matmul import triton_kernel as tile
from fp4jax.ops.w4a16_matmul.triton import TileConfig


def find_tile(
    index: Int32[Array, ""], sizes: Int32[Array, " groups"], t: int, e: int, block_m: int
) -> tuple[Int32[Array, ""], Int32[Array, ""], Int32[Array, ""]]:
    """Which rows the tile number ``index`` covers, and whose they are.

    Args:
      index: number of the tile.
      sizes: rows a group, padded with zeros to any length from ``e`` on.

    Returns:
      Its group (``e`` or more for the rows past the last one), its first row, and the end of its
      group; where there is no such tile, the first row is ``t`` or more.
    """
    group = lax.iota(jnp.int32, sizes.shape[0])
    tiles = lax.div(sizes + (block_m - 1), jnp.int32(block_m))
    mine = jnp.sum((jnp.cumsum(tiles) <= index).astype(jnp.int32))
    first = index * block_m + jnp.sum(jnp.where(group < mine, sizes - tiles * block_m, 0))
    end = jnp.sum(jnp.where(group <= mine, sizes, 0))
    return mine, first, jnp.where(mine < e, jnp.minimum(end, t), t)


def _kernel(
    words, scales, x, global_scale, group_sizes, out, *, config, shards, divide, k, interpret
):
    (t, n), (e,) = out.shape[1:], group_sizes.shape
    group = lax.iota(jnp.int32, pl.next_power_of_2(e))
    sizes = plgpu.load(group_sizes.at[jnp.minimum(group, e - 1)], mask=group < e, other=0)
    mine, first, end = find_tile(pl.program_id(2), sizes, t, e, config.block_m)
    row = first + lax.iota(jnp.int32, config.block_m)
    part = pl.program_id(1)
    feature = pl.program_id(0) * config.block_n + lax.iota(jnp.int32, config.block_n)
    lead = (jnp.minimum(mine, e - 1),)
    total = tile.accumulate(
        words,
        scales,
        x,
        lead,
        tile.clamp(feature, words.shape[1], config.block_n),
        row,
        row < end,
        part,
        (mine < e) & (first < end),
        config,
        k=k,
        interpret=interpret,
    )
    total = tile.apply_shard_scale(total, feature, global_scale, lead, shards, divide)
    plgpu.store(
        out.at[part, row[None, :], feature[:, None]],
        total.astype(out.dtype),
        mask=(feature < n)[:, None] & (row < end)[None, :],
    )


def grouped_call(
    x: Float[Array, "t k"],
    w: MarlinWeight,
    group_sizes: Int[Array, " e"],
    out_dtype,
    config: TileConfig,
    interpret: bool,
) -> Float[Array, "t n"]:
    """One launch; where K is split, a second, fused pass adds the parts in order."""
    (t, _), (e,), n = x.shape, w.stack, w.n
    split = config.split_k
    operands = vary_alike(w.words, w.scales, x, w.global_scale, group_sizes)
    parts = pl.pallas_call(
        functools.partial(
            _kernel,
            config=config,
            shards=w.shards,
            divide=w.global_is_divisor,
            k=w.k,
            interpret=interpret,
        ),
        out_shape=jax.ShapeDtypeStruct(
            (split, t, n),
            out_dtype if split == 1 else jnp.float32,
            manual_axis_type=jax.typeof(operands[0]).manual_axis_type,
        ),
        grid=(pl.cdiv(n, config.block_n), split, most_tiles(t, e, config.block_m)),
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="w4a16_grouped_matmul",
    )(*operands)
    return tile.add_parts(parts).astype(out_dtype)
