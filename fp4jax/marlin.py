"""The repacked weight: what kernels read, as an immutable pytree node.

A repack happens once, at init or load. Its result is a leaf-bearing node of the parameter tree,
an argument of every compiled function, and nothing else: there is no table to look it up in, so
one engine can never be given another's buffer.

Layout ``k64.v1`` (one matrix; stacks add leading axes)::

    words  u16 [R, ceil(K/64)*16]   word (n, 16 t + c), nibble j  <->  k = 64 t + 16 j + c
    scales u8  [R, ceil(K/256)*16]  scale (n, g) in natural order, re-biased to S0E5M3
    R = N rounded up to 8

Nibble plane j of 16 neighbouring words is then a full ``[rows, 16]`` operand with one scale a
row, and x keeps its natural order. K is padded only to 64, so that tensor-parallel shards and
odd expert widths (1856 = 29·64) cost nothing; scale rows are padded to 16 bytes, the pitch that
TMA needs.

S0E5M3: e4m3 spans 2^-9 (subnormal) to 448, 18 exponents, so 5 exponent bits and 3 mantissa bits
without a sign hold every finite non-negative value exactly: byte ``8 e + m`` is
``(1 + m/8) * 2^(e-9)``, and widening it to bf16 or f32 is one shift and one add. There is no
zero; a zero block has :data:`ZERO_SCALE` and zero magnitudes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, UInt8, UInt16, UInt32

from fp4jax.checksums import checksum, combine_checksums
from fp4jax.errors import FormatError
from fp4jax.nvfp4 import (
    BLOCK_SIZE,
    NVFP4Weight,
    canonicalize,
    decode_e2m1,
    pack_codes,
)
from fp4jax.rounding import exact_divide

LAYOUT = "k64.v1"
ROW_MULTIPLE = 8
K_MULTIPLE = 64
SCALE_MULTIPLE = 16

ZERO_SCALE = 0x90
"""Scale byte of a zero block: finite (2^9), outside e4m3's range, and only ever over zero codes."""


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarlinWeight:
    """An NVFP4 matrix, or several fused along N, in the kernels' layout. Immutable.

    Attributes:
      words: u16 ``[..., R, W]``, four codes a word (see the module docstring).
      scales: u8 ``[..., R, G]``, S0E5M3 block scales.
      global_scale: f32 ``[..., S]``, one an output shard, as the checkpoint stored it.
      fingerprint: u32 ``[..., 4]``, checksum of the other leaves and of the static fields.
      shards: output features of each fused shard; N is their sum.
      k: input features.
      global_is_divisor: divide by the global scale (compressed-tensors) or multiply (ModelOpt).
      layout: name and version of the word layout.
    """

    words: UInt16[Array, "*stack rows words"]
    scales: UInt8[Array, "*stack rows groups"]
    global_scale: Float32[Array, "*stack shards"]
    fingerprint: UInt32[Array, "*stack 4"]
    shards: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    k: int = dataclasses.field(metadata={"static": True})
    global_is_divisor: bool = dataclasses.field(default=False, metadata={"static": True})
    layout: str = dataclasses.field(default=LAYOUT, metadata={"static": True})

    @property
    def n(self) -> int:
        """Output features, padding excluded."""
        return sum(self.shards)

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading axes (experts), ``()`` for one matrix."""
        return self.words.shape[:-2]

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape ``[..., N, K]``."""
        return (*self.stack, self.n, self.k)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, padding included."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    @property
    def static_facts(self) -> tuple[Any, ...]:
        """What identifies the weight besides its fingerprint."""
        return (self.layout, self.shards, self.k, self.stack, self.global_is_divisor)


def encode_scale(scale: Array) -> UInt8[Array, "*shape"]:
    """f8e4m3fn (finite, not negative) to S0E5M3 bytes; 0 becomes :data:`ZERO_SCALE`."""
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    mantissa = bits & jnp.uint8(7)
    # A subnormal m·2^-9 (m = 1..7) has its leading one at bit floor(log2 m).
    subnormal = jnp.asarray([ZERO_SCALE, 0, 8, 12, 16, 18, 20, 22], jnp.uint8)[mantissa]
    return jnp.where(bits < 8, subnormal, bits + jnp.uint8(16))


def decode_scale(scales: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """S0E5M3 bytes to f32. :data:`ZERO_SCALE` reads as 512; its codes are zero."""
    bits = (scales.astype(jnp.uint32) << 20) + jnp.uint32((127 - 9) << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _scale_to_e4m3(scales: UInt8[Array, "*shape"]) -> Array:
    value = jnp.where(scales == ZERO_SCALE, 0.0, decode_scale(scales))
    return value.astype(jnp.float8_e4m3fn)


def _interleave(packed: UInt8[Array, "n k_half"]) -> UInt16[Array, "n words"]:
    """Layout words, K padded with code 0. Works on packed pairs: no byte a code is written out."""
    n, half = packed.shape
    tiles = -(-half // (K_MULTIPLE // 2))
    packed = jnp.pad(packed, ((0, 0), (0, tiles * (K_MULTIPLE // 2) - half)))
    planes = packed.reshape(n, tiles, 4, 8).astype(jnp.uint32)
    # A byte holds codes of neighbouring k, which go to one nibble of neighbouring words.
    pairs = (planes & jnp.uint32(0xF)) | (planes >> 4) << 16
    both = pairs[:, :, 0] | pairs[:, :, 1] << 4 | pairs[:, :, 2] << 8 | pairs[:, :, 3] << 12
    return jax.lax.bitcast_convert_type(both, jnp.uint16).reshape(n, tiles * 16)


def word_codes(words: UInt16[Array, "*lead words"]) -> UInt8[Array, "*lead k_pad"]:
    """Codes in natural k order from layout words (padding included)."""
    lead, w = words.shape[:-1], words.shape[-1]
    tiles = words.reshape(*lead, w // 16, 1, 16)
    shifts = jnp.asarray([0, 4, 8, 12], jnp.uint16)[:, None]
    planes = (tiles >> shifts) & jnp.uint16(0xF)
    return planes.reshape(*lead, w * 4).astype(jnp.uint8)


def _repack_matrix(weights: Sequence[NVFP4Weight]) -> MarlinWeight:
    words = jnp.concatenate([_interleave(canonicalize(w).packed) for w in weights])
    scales = jnp.concatenate([encode_scale(w.scale) for w in weights])
    return _assemble(
        words,
        scales,
        jnp.stack([w.global_scale for w in weights]),
        shards=tuple(w.n for w in weights),
        k=weights[0].k,
        global_is_divisor=weights[0].global_is_divisor,
    )


def _assemble(
    words: UInt16[Array, "n words"],
    scales: UInt8[Array, "n groups"],
    global_scale: Float32[Array, " shards"],
    **static,
) -> MarlinWeight:
    """Pads one matrix to the layout's multiples and takes its fingerprint."""
    rows = (0, _round_up(words.shape[0], ROW_MULTIPLE) - words.shape[0])
    groups = (0, _round_up(scales.shape[1], SCALE_MULTIPLE) - scales.shape[1])
    words = jnp.pad(words, (rows, (0, 0)))
    scales = jnp.pad(scales, (rows, groups), constant_values=ZERO_SCALE)
    # Of the arrays as laid out: padding and dead codes are fixed by then, so equal content has
    # equal bits, whatever wrote the checkpoint.
    parts = [checksum(leaf, str(static)) for leaf in (words, scales, global_scale)]
    return MarlinWeight(words, scales, global_scale, combine_checksums(parts), **static)


@jax.jit
def _repack(weights: tuple[NVFP4Weight, ...]) -> MarlinWeight:
    fn = _repack_matrix
    for _ in weights[0].packed.shape[:-2]:
        fn = jax.vmap(fn)
    return fn(weights)


def repack(weight: NVFP4Weight | Sequence[NVFP4Weight]) -> MarlinWeight:
    """Repacks one weight, or fuses several along N (gate+up, q+k+v), for the kernels. Jitted.

    Args:
      weight: ``[..., N, K]``; leading axes (experts) become stacked axes of the result. Shards
        must share K, the stack and the meaning of the global scale; they keep their own value.

    Returns:
      A new :class:`MarlinWeight`; nothing is remembered anywhere else.

    Raises:
      FormatError: shapes are not NVFP4's, or shards do not fit together.
    """
    weights = (weight,) if isinstance(weight, NVFP4Weight) else tuple(weight)
    if not weights:
        raise FormatError("repack needs at least one weight")
    first = weights[0]
    for w in weights:
        if w.k % BLOCK_SIZE:
            raise FormatError(f"K = {w.k} is not a multiple of the block size {BLOCK_SIZE}")
        if w.scale.shape != (*w.packed.shape[:-1], w.k // BLOCK_SIZE):
            raise FormatError(f"block scales {w.scale.shape} do not fit codes {w.packed.shape}")
        if w.global_scale.shape != w.packed.shape[:-2]:
            raise FormatError(f"global scale {w.global_scale.shape} does not fit {w.packed.shape}")
        if (w.k, w.packed.shape[:-2]) != (first.k, first.packed.shape[:-2]):
            raise FormatError(f"fused shards disagree: {w.shape} beside {first.shape}")
        if w.global_is_divisor != first.global_is_divisor:
            raise FormatError("fused shards mix a multiplier and a divisor global scale")
    return _repack(weights)


@jax.jit
def _unpack(weight: MarlinWeight) -> tuple[NVFP4Weight, ...]:
    n, k = weight.n, weight.k
    packed = pack_codes(word_codes(weight.words)[..., :n, :k])
    scale = _scale_to_e4m3(weight.scales[..., :n, : k // BLOCK_SIZE])
    ends = [sum(weight.shards[: i + 1]) for i in range(len(weight.shards))]
    return tuple(
        NVFP4Weight(
            packed=packed[..., end - size : end, :],
            scale=scale[..., end - size : end, :],
            global_scale=weight.global_scale[..., i],
            global_is_divisor=weight.global_is_divisor,
        )
        for i, (size, end) in enumerate(zip(weight.shards, ends, strict=True))
    )


def unpack(weight: MarlinWeight) -> NVFP4Weight | tuple[NVFP4Weight, ...]:
    """Inverse of :func:`repack`, bit for bit: one weight, or a tuple where shards were fused."""
    shards = _unpack(weight)
    return shards[0] if len(shards) == 1 else shards


def per_row_global_scale(weight: MarlinWeight) -> Float32[Array, "*stack n"]:
    """The stored global scale of each output row."""
    parts = [
        jnp.broadcast_to(weight.global_scale[..., i : i + 1], (*weight.stack, size))
        for i, size in enumerate(weight.shards)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def apply_global_scale(
    weight: MarlinWeight, accumulated: Float32[Array, "*lead n"]
) -> Float32[Array, "*lead n"]:
    """f32 accumulators over exact code·scale products, brought to the weight's true scale.

    ``weight`` is one matrix (no stack); the last axis of ``accumulated`` is N.
    """
    scale = weight.global_scale[0] if len(weight.shards) == 1 else per_row_global_scale(weight)
    return accumulated / scale if weight.global_is_divisor else accumulated * scale


def decode(weight: MarlinWeight, dtype=jnp.float32) -> Float[Array, "*stack n k"]:
    """Code times block scale, without the global scale: exact in f32, bf16 and f16."""
    n = weight.n
    return _decode(weight.words[..., :n, :], weight.scales[..., :n, :], weight.k).astype(dtype)


def _decode(
    words: UInt16[Array, "*lead words"], scales: UInt8[Array, "*lead groups"], k: int
) -> Float32[Array, "*lead k"]:
    values = decode_e2m1(word_codes(words)[..., :k])
    scale = decode_scale(scales[..., : k // BLOCK_SIZE])
    return values * jnp.repeat(scale, BLOCK_SIZE, axis=-1)


def dequantize_repacked(weight: MarlinWeight, dtype=jnp.float32) -> Float[Array, "*stack n k"]:
    """The matrix in ``dtype``: the exact product of code and block scale, rounded once in f32.

    :func:`fp4jax.nvfp4.dequantize` rounds twice, as the quantizers' own dequantization does.
    """
    scale = per_row_global_scale(weight)[..., None]
    return _apply(weight, decode(weight), scale).astype(dtype)


def take_rows(
    weight: MarlinWeight, rows: Int[Array, "*batch"], dtype=jnp.float32
) -> Float[Array, "*batch k"]:
    """Rows of :func:`dequantize_repacked`: the embedding lookup of a quantized table.

    Rows out of range are clamped, as ``jnp.take(mode="clip")`` does.
    """
    rows = jnp.clip(rows, 0, weight.n - 1)
    exact = _decode(weight.words[rows], weight.scales[rows], weight.k)
    scale = per_row_global_scale(weight)[rows][..., None]
    return _apply(weight, exact, scale).astype(dtype)


def _apply(weight: MarlinWeight, exact: Array, scale: Array) -> Float32[Array, "*shape"]:
    return exact_divide(exact, scale) if weight.global_is_divisor else exact * scale


def random_weight(
    key: Array, shards: Sequence[int], k: int, stack: Sequence[int] = ()
) -> MarlinWeight:
    """A random repacked weight with entries of standard deviation about ``k ** -0.5``.

    Codes are uniform (root mean square 2.97), block scales lie between 0.5 and 1.875 (mean
    1.19), and the global scale makes up the rest. Drawn directly in the kernels' layout, because
    under ``jit(module.init)`` every weight of a model is compiled by itself.
    """
    if k % BLOCK_SIZE:
        raise FormatError(f"K = {k} is not a multiple of the block size {BLOCK_SIZE}")
    return _random_weight(key, tuple(shards), k, tuple(stack))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random_weight(
    key: Array, shards: tuple[int, ...], k: int, stack: tuple[int, ...]
) -> MarlinWeight:
    n, groups = sum(shards), k // BLOCK_SIZE
    width, scale_width = _round_up(k, K_MULTIPLE) // 8, -(-groups // 4)
    bits = jax.random.bits(key, (*stack, n, width + scale_width), jnp.uint32)
    words = jax.lax.bitcast_convert_type(bits[..., :width], jnp.uint16)
    words = words.reshape(*stack, n, 2 * width)
    # Planes past K hold code 0; only the last tile has any.
    planes = np.clip(groups - 4 * (np.arange(2 * width) // 16), 0, 4)
    words &= jnp.asarray((1 << 4 * planes) - 1, jnp.uint16)
    # A block scale is 0x30 to 0x3f in e4m3, and 16 more in S0E5M3.
    octets = (bits[..., width:] & jnp.uint32(0x0F0F0F0F)) + jnp.uint32(0x40404040)
    scales = jax.lax.bitcast_convert_type(octets, jnp.uint8)
    scales = scales.reshape(*stack, n, 4 * scale_width)[..., :groups]
    global_scale = jnp.full((*stack, len(shards)), 1 / (3.6 * math.sqrt(k)), jnp.float32)
    fn = functools.partial(_assemble, shards=shards, k=k, global_is_divisor=False)
    for _ in stack:
        fn = jax.vmap(fn)
    return fn(words, scales, global_scale)
