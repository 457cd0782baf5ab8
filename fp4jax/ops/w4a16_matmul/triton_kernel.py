"""The Pallas (Triton) kernel of the plain op, and the tile code that the grouped op shares.

A program owns ``block_n`` output features and ``block_m`` rows of x and walks K in steps of
``tiles`` layout tiles (64 k each). The weight stands on the left, ``out.T = W @ x.T``: its operand
is decoded in registers and never passes shared memory as bf16, and M takes the short side of the
matrix instruction.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from fp4jax.marlin import K_MULTIPLE, MarlinWeight
from fp4jax.nvfp4 import BLOCK_SIZE
from fp4jax.ops.varying import vary_alike
from fp4jax.ops.w4a16_matmul.triton import TileConfig
from fp4jax.ops.w4a16_matmul.triton_decode import PLANES, bf16_parts, decoder_of, operand


def accumulate(
    words,
    scales,
    x,
    lead: tuple[Int32[Array, ""], ...],
    rows: Int32[Array, " bn"],
    x_rows: Int32[Array, " bm"],
    x_inside: Bool[Array, " bm"] | None,
    part: Int32[Array, ""],
    active: Bool[Array, ""] | None,
    config: TileConfig,
    *,
    k: int,
    interpret: bool,
) -> Float32[Array, "bn bm"]:
    """f32 sums of ``W[rows] @ x[x_rows].T`` over the K range of one split, without global scale.

    Args:
      words, scales, x: references to whole arrays.
      lead: index of the matrix in a stack, ``()`` for one matrix.
      rows: valid indices; clamped ones give sums that the caller does not store.
      x_rows: indices, not read where ``x_inside`` is false; None is true everywhere. (Clamping
        these instead would have every program read one row many times over.)
      part: which of the ``config.split_k`` ranges.
      active: where false, nothing is read and the sums are 0; None is always true.
      k: input features.
    """
    decoder = decoder_of(x.dtype)
    tiles = config.tiles
    steps = -(-k // (K_MULTIPLE * tiles))
    per = -(-steps // config.split_k)
    word_lane = lax.iota(jnp.int32, BLOCK_SIZE * tiles)
    scale_lane = lax.iota(jnp.int32, PLANES * tiles)
    x_lane = lax.iota(jnp.int32, K_MULTIPLE * tiles)

    def step(i: Array, total: Array) -> Array:
        column = i * (BLOCK_SIZE * tiles) + word_lane
        word = _load(
            words.at[(*lead, rows[:, None], column[None, :])],
            None,
            _inside(column, words.shape[-1], BLOCK_SIZE * tiles),
        )
        group = i * (PLANES * tiles) + scale_lane
        byte = _load(
            scales.at[(*lead, rows[:, None], group[None, :])],
            None,
            _inside(group, scales.shape[-1], PLANES * tiles),
        )
        column = i * (K_MULTIPLE * tiles) + x_lane
        value = _load(
            x.at[x_rows[:, None], column[None, :]], x_inside, _inside(column, k, K_MULTIPLE * tiles)
        )
        a = operand(word, byte, decoder, interpret)
        for b in bf16_parts(value) if x.dtype == jnp.float32 else (value,):
            total = total + lax.dot_general(
                a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
        return total

    zero = jnp.zeros((config.block_n, config.block_m), jnp.float32)
    first = part * per
    last = first + per if steps % config.split_k == 0 else jnp.minimum(first + per, steps)
    if active is not None:
        last = jnp.where(active, last, first)
    return lax.fori_loop(first, last, step, zero) * decoder.compensation


def _inside(index: Int32[Array, " b"], size: int, block: int) -> Bool[Array, " b"] | None:
    return index < size if size % block else None


def _load(ref, rows: Bool[Array, " r"] | None, columns: Bool[Array, " c"] | None) -> Array:
    """A block of ``ref``, 0 outside of the masks (None: none needed)."""
    mask = None if rows is None else jnp.broadcast_to(rows[:, None], ref.shape)
    if columns is not None:
        inside = jnp.broadcast_to(columns[None, :], ref.shape)
        mask = inside if mask is None else mask & inside
    return plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0)


def clamp(index: Int32[Array, " b"], size: int, block: int) -> Int32[Array, " b"]:
    """Keeps indices in range where blocks do not divide ``size``."""
    return jnp.minimum(index, size - 1) if size % block else index


def apply_shard_scale(
    total: Float32[Array, "bn bm"],
    features: Int32[Array, " bn"],
    global_scale,
    lead: tuple[Int32[Array, ""], ...],
    shards: tuple[int, ...],
    divide: bool,
) -> Float32[Array, "bn bm"]:
    """Sums times (or divided by) the global scale of each output feature's shard."""
    scale, start = global_scale[(*lead, 0)], 0
    for i, size in enumerate(shards[:-1]):
        start += size
        scale = jnp.where(features >= start, global_scale[(*lead, i + 1)], scale)
    if len(shards) > 1:
        scale = scale[:, None]
    return total / scale if divide else total * scale


def add_parts(parts: Float[Array, "split m n"]) -> Float[Array, "m n"]:
    """Sum over the splits of K, always in the same order."""
    total = parts[0]
    for i in range(1, parts.shape[0]):
        total = total + parts[i]
    return total


def _kernel(words, scales, x, global_scale, *rest, config, shards, divide, k, interpret):
    m, n = x.shape[0], sum(shards)
    bias, out = (rest[0], rest[1]) if len(rest) == 2 else (None, rest[0])
    row = pl.program_id(0) * config.block_m + lax.iota(jnp.int32, config.block_m)
    part = pl.program_id(1)
    feature = pl.program_id(2) * config.block_n + lax.iota(jnp.int32, config.block_n)
    total = accumulate(
        words,
        scales,
        x,
        (),
        clamp(feature, words.shape[0], config.block_n),
        row,
        row < m if m % config.block_m else None,
        part,
        None,
        config,
        k=k,
        interpret=interpret,
    )
    total = apply_shard_scale(total, feature, global_scale, (), shards, divide)
    if bias is not None:
        total = (
            total
            + plgpu.load(bias.at[clamp(feature, n, config.block_n)]).astype(jnp.float32)[:, None]
        )
    plgpu.store(
        out.at[part, row[None, :], feature[:, None]],
        total.astype(out.dtype),
        mask=(feature < n)[:, None] & (row < m)[None, :],
    )


def dense_call(
    x: Float[Array, "m k"],
    w: MarlinWeight,
    bias: Float[Array, " n"] | None,
    out_dtype,
    config: TileConfig,
    interpret: bool,
) -> Float[Array, "m n"]:
    """One launch; where K is split, a second, fused pass adds the parts in order."""
    m, n = x.shape[0], w.n
    split = config.split_k
    operands = [w.words, w.scales, x, w.global_scale]
    if bias is not None and split == 1:
        operands.append(bias)
    operands = vary_alike(*operands)
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
            (split, m, n),
            out_dtype if split == 1 else jnp.float32,
            manual_axis_type=jax.typeof(operands[0]).manual_axis_type,
        ),
        grid=(pl.cdiv(m, config.block_m), split, pl.cdiv(n, config.block_n)),
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="w4a16_matmul",
    )(*operands)
    total = add_parts(parts)
    if bias is not None and split > 1:
        total = total + bias.astype(jnp.float32)
    return total.astype(out_dtype)
