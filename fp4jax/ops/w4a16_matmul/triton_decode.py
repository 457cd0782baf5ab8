"""Decoding NVFP4 words into matrix operands inside a Pallas (Triton) kernel.

A ``[n, 16 * tiles]`` tile of words holds four nibble planes. Each decodes elementwise, two
neighbouring k in one 32-bit register, and the planes are joined along runs of 16 k, which are
whole registers of the matrix operand: the joint ``[n, 64 * tiles]`` operand is in natural k order
without moving a bit.

Exactness: a code's three magnitude bits go to the top of the mantissa and the bottom of the
exponent (value · 2^-126 in bf16, · 2^-14 in f16, 0.5 as a subnormal), the block scale carries
most of the way back, and a power of two applied to the f32 sums does the rest. No product rounds:
code times block scale has six significant bits.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, UInt8, UInt16

from fp4jax.marlin import K_MULTIPLE
from fp4jax.nvfp4 import BLOCK_SIZE

PLANES = K_MULTIPLE // BLOCK_SIZE


@dataclasses.dataclass(frozen=True)
class Decoder:
    """How codes and scale bytes become numbers of one 16-bit dtype by integer operations.

    Attributes:
      dtype: of the operands.
      mantissa: its stored mantissa bits.
      scale_bias: exponent offset, in the dtype's bits, of a shifted S0E5M3 byte.
      shifts: a nibble plane: left shift of its sign; left (negative: right) shift of its magnitude.
      multiply: the PTX multiply-add of packed pairs.
      compensation: what the f32 sums are multiplied with.
    """

    dtype: str
    mantissa: int
    scale_bias: int
    shifts: tuple[tuple[int, int], ...]
    multiply: str
    compensation: float

    @property
    def magnitude_mask(self) -> int:
        """The three magnitude bits in place."""
        return 7 << (self.mantissa - 1)


BF16 = Decoder(
    "bfloat16", 7, 224 << 7, ((12, 6), (8, 2), (4, -2), (0, -6)), "fma.rn.bf16x2", 2.0**20
)
F16 = Decoder("float16", 10, 12 << 10, ((12, 9), (8, 5), (4, 1), (0, -3)), "fma.rn.f16x2", 2.0**8)


def decoder_of(x_dtype) -> Decoder:
    """f16 activations take f16 operands; bf16 and (in three parts) f32 take bf16."""
    return F16 if jnp.dtype(x_dtype) == jnp.float16 else BF16


def _pairwise(asm: str, dtype: str, *args: Array) -> Array:
    """PTX over registers that hold two neighbouring 16-bit elements each."""
    [out] = plgpu.elementwise_inline_asm(
        asm,
        args=args,
        constraints=",".join(["=r"] + ["r"] * len(args)),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return out


def plane_ptx(plane: int, decoder: Decoder) -> str:
    """PTX that takes two words in $1 to two numbers in $0: one nibble's sign and magnitude bits."""
    sign, magnitude = decoder.shifts[plane]
    both = 0x10001 * (decoder.magnitude_mask | 0x8000)
    if sign - magnitude < 4:
        move = f"shl.b32 a, $1, {sign};" if sign else "mov.b32 a, $1;"
        direction = "shl" if magnitude > 0 else "shr"
        return (
            f"{{ .reg .b32 a, b; {move} {direction}.b32 b, $1, {abs(magnitude)};"
            f" and.b32 b, b, {both & 0x7FFF7FFF:#x}; lop3.b32 $0, a, 0x80008000, b, 0xEA; }}"
        )
    # A nibble's two shifted copies do not overlap: one multiply makes both. It cannot shift
    # right, so the upper planes are brought down first (once for both of them).
    move = "shr.b32 a, $1, 8;" if plane >= 2 else "mov.b32 a, $1;"
    sign, magnitude = decoder.shifts[plane % 2]
    return (
        f"{{ .reg .b32 a; {move} and.b32 a, a, {0x000F000F << 4 * (plane % 2):#x};"
        f" mul.lo.u32 a, a, {2**sign + 2**magnitude:#x}; and.b32 $0, a, {both:#x}; }}"
    )


def _plane_gpu(words: Array, plane: int, decoder: Decoder) -> Array:
    return _pairwise(plane_ptx(plane, decoder), decoder.dtype, words)


def _times_scale_gpu(codes: Array, scale_bits: Array, decoder: Decoder) -> Array:
    # The addend is -0, so that the product's own sign of zero survives. A plain multiply of bf16
    # pairs is newer hardware's.
    asm = f"{{ .reg .b32 z; mov.b32 z, 0x80008000; {decoder.multiply} $0, $1, $2, z; }}"
    return _pairwise(asm, decoder.dtype, codes, scale_bits)


def _plane_portable(words: Array, plane: int, decoder: Decoder) -> Array:
    """What :func:`plane_ptx` leaves in place, read as sign, exponent and mantissa; as f32, 2^126
    (2^14) times larger, because a CPU flushes subnormal operands."""
    sign, magnitude = decoder.shifts[plane]
    words = words.astype(jnp.uint32)
    moved = words << magnitude if magnitude > 0 else words >> -magnitude
    field = (moved & decoder.magnitude_mask) >> (decoder.mantissa - 1)
    half = (field & 1).astype(jnp.float32) * 0.5
    power = lax.bitcast_convert_type(((field >> 1) + 126) << 23, jnp.float32)
    value = jnp.where(field < 2, half, (1 + half) * power)
    return jnp.where(((words << sign) & 0x8000) != 0, -value, value)


def _times_scale_portable(values: Array, scale_bits: Array, decoder: Decoder) -> Array:
    scale = lax.bitcast_convert_type(scale_bits, jnp.dtype(decoder.dtype)).astype(jnp.float32)
    exponent_bias = (1 << (14 - decoder.mantissa)) - 1
    return (values * (scale * 2.0 ** (1 - exponent_bias))).astype(decoder.dtype)


def _natural_order(planes: list[Array], tiles: int) -> Array:
    """``[n, 64 * tiles]`` in natural k order from four ``[n, 16 * tiles]`` nibble planes."""
    low = jnp.stack([planes[0], planes[2]], axis=-1)
    high = jnp.stack([planes[1], planes[3]], axis=-1)
    pairs = jnp.stack([low, high], axis=-1)  # plane = 2 * axis -2 + axis -1
    n = planes[0].shape[0]
    tiled = pairs.reshape(n, tiles, BLOCK_SIZE, 2, 2).transpose(0, 1, 3, 4, 2)
    return tiled.reshape(n, tiles * K_MULTIPLE)


def operand(
    words: UInt16[Array, "n words"],
    scale_bytes: UInt8[Array, "n groups"],
    decoder: Decoder,
    interpret: bool,
) -> Float[Array, "n k"]:
    """Code times block scale, divided by ``decoder.compensation``, in natural k order.

    Args:
      words: ``k / 4`` layout words a row.
      scale_bytes: ``k / 16`` S0E5M3 bytes a row.
      interpret: do the same in portable operations, where there is no PTX.
    """
    plane = _plane_portable if interpret else _plane_gpu
    times_scale = _times_scale_portable if interpret else _times_scale_gpu
    n, groups = scale_bytes.shape
    planes = [plane(words, j, decoder) for j in range(PLANES)]
    codes = _natural_order(planes, groups // PLANES)
    # Both halves of a register at once: the compiler then keeps the pair together.
    shift = decoder.mantissa - 3
    pair = scale_bytes.astype(jnp.uint32) * jnp.uint32(0x10001 << shift) + jnp.uint32(
        0x10001 * decoder.scale_bias
    )
    bits = jnp.stack([pair.astype(jnp.uint16), (pair >> 16).astype(jnp.uint16)], axis=-1)
    bits = jnp.broadcast_to(bits[:, :, None, :], (n, groups, BLOCK_SIZE // 2, 2))
    return times_scale(codes, bits.reshape(n, groups * BLOCK_SIZE), decoder)


def bf16_parts(x: Float32[Array, "m k"]) -> tuple[Array, ...]:
    """Three bf16 arrays that sum to ``x`` exactly: 24 bits, eight at a time, by truncation."""
    parts = []
    for _ in range(2):
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-0x10000)
        high = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(high.astype(jnp.bfloat16))
        x = jnp.where(x == high, 0.0, x - high)  # infinity minus itself would be NaN
    return (*parts, x.astype(jnp.bfloat16))
