"""NVFP4, the number format: 4-bit e2m1 codes, an e4m3 scale a block of 16, one f32 global scale.

This module is the definition, in plain ``jax.numpy``: what the bits mean, how two public
quantizers make them, and nothing about how a kernel wants them laid out (that is
:mod:`fp4jax.marlin`).

Sources: the OCP Microscaling specification v1.0 (e2m1, e4m3), NVIDIA's NVFP4 description, and
the files that ``nvidia-modelopt`` and ``compressed-tensors`` write.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float8e4m3fn, Float32, UInt8

from fp4jax.errors import FormatError
from fp4jax.rounding import encode_e2m1, encode_e4m3, exact_divide, is_nonzero, round_to

BLOCK_SIZE = 16
"""Elements along K that share one block scale."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9

Convention = Literal["modelopt", "compressed-tensors"]
"""Whose arithmetic :func:`quantize` follows, and so what the global scale means."""

SMALLEST_AMAX = 2.0**-105
"""Below this a matrix counts as zero: its scales would fall out of f32's normal range."""

# Python floats, not an array: a module holds no device state.
# fmt: off
E2M1_VALUES = (
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0,
    -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
)
# fmt: on
"""Value of each 4-bit code; bit 3 is the sign."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NVFP4Weight:
    """A quantized matrix (or a stack of them) exactly as a checkpoint stores it.

    ``value[n, k] = e2m1(code[n, k]) * (f32(scale[n, k // 16]) * global_scale)``, or
    ``… * (f32(scale[n, k // 16]) / global_scale)`` where ``global_is_divisor``.

    Attributes:
      packed: u8 ``[..., N, K/2]``, two codes a byte, the low nibble is the even k.
      scale: f8e4m3fn ``[..., N, K/16]``, finite and not negative.
      global_scale: f32 ``[...]``, one a matrix, finite and positive.
      global_is_divisor: compressed-tensors stores the divisor, ModelOpt the multiplier. The stored
        number is kept: a rounded reciprocal would differ in the last bits.
    """

    packed: UInt8[Array, "*stack n k_half"]
    scale: Float8e4m3fn[Array, "*stack n groups"]
    global_scale: Float32[Array, "*stack"]
    global_is_divisor: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape ``[..., N, K]``."""
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])

    @property
    def n(self) -> int:
        """Output features."""
        return self.packed.shape[-2]

    @property
    def k(self) -> int:
        """Input features (the contracted axis)."""
        return 2 * self.packed.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.size * x.dtype.itemsize for x in (self.packed, self.scale, self.global_scale))


def unpack_codes(packed: UInt8[Array, "*lead k_half"]) -> UInt8[Array, "*lead k"]:
    """4-bit codes, one a byte, from packed pairs (low nibble first)."""
    pairs = jnp.stack([packed & jnp.uint8(0xF), packed >> jnp.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_codes(codes: UInt8[Array, "*lead k"]) -> UInt8[Array, "*lead k_half"]:
    """Inverse of :func:`unpack_codes`."""
    # Through 16 bits, not by taking every other code: what makes the codes stays vectorized then.
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    pairs = jax.lax.bitcast_convert_type(pairs, jnp.uint16)
    return (pairs | pairs >> jnp.uint16(4)).astype(jnp.uint8)


def decode_e2m1(codes: UInt8[Array, "*shape"], dtype=jnp.float32) -> Float[Array, "*shape"]:
    """The value of each 4-bit code (upper bits must be 0), by table, -0 kept."""
    return jnp.asarray(E2M1_VALUES, dtype)[codes]


def effective_scale(weight: NVFP4Weight) -> Float32[Array, "*stack n groups"]:
    """f32 scale of each block, the global scale applied the way the checkpoint means it."""
    scale = weight.scale.astype(jnp.float32)
    global_scale = weight.global_scale[..., None, None]
    return exact_divide(scale, global_scale) if weight.global_is_divisor else scale * global_scale


def dequantize(weight: NVFP4Weight, dtype=jnp.float32) -> Float[Array, "*stack n k"]:
    """The matrix in ``dtype``: ``e2m1 * (block scale * global scale)``, computed in f32.

    Bit-equal in f32 to ModelOpt's and compressed-tensors' own dequantization.
    """
    values = decode_e2m1(unpack_codes(weight.packed))
    scale = jnp.repeat(effective_scale(weight), BLOCK_SIZE, axis=-1)
    return (values * scale).astype(dtype)


def canonicalize(weight: NVFP4Weight) -> NVFP4Weight:
    """The same values with the magnitude bits cleared in every block whose scale is 0.

    Such codes carry nothing (signs are kept, so even -0 stays -0). :func:`fp4jax.marlin.repack`
    does this, because the kernels' re-biased scale has no zero.
    """
    dead = jnp.repeat(weight.scale.astype(jnp.float32) == 0, BLOCK_SIZE // 2, axis=-1)
    packed = jnp.where(dead, weight.packed & jnp.uint8(0x88), weight.packed)
    return dataclasses.replace(weight, packed=packed)


def validate(weight: NVFP4Weight, name: str = "weight") -> None:
    """Refuses a concrete weight that is not valid NVFP4.

    Works on host (numpy) and device arrays; on the host nothing is copied to a device.

    Raises:
      FormatError: naming the tensor, the first offending index and the value found.
    """
    packed, scale, global_scale = weight.packed, weight.scale, weight.global_scale
    if packed.dtype != np.uint8:
        raise FormatError(f"{name}: packed codes must be uint8 (two a byte), found {packed.dtype}")
    if scale.dtype != jnp.float8_e4m3fn:
        raise FormatError(f"{name}: block scales must be float8_e4m3fn, found {scale.dtype}")
    if packed.ndim < 2:
        raise FormatError(f"{name}: packed codes must be [..., N, K/2], found {packed.shape}")
    if weight.k % BLOCK_SIZE:
        raise FormatError(
            f"{name}: K = {weight.k} is not a multiple of the block size {BLOCK_SIZE}"
        )
    want = (*packed.shape[:-1], weight.k // BLOCK_SIZE)
    if scale.shape != want:
        raise FormatError(
            f"{name}: block scales have shape {scale.shape}, codes {packed.shape} need {want}"
        )
    if global_scale.shape != packed.shape[:-2]:
        raise FormatError(
            f"{name}: global scale has shape {global_scale.shape}, needs {packed.shape[:-2]}"
        )
    bits = np.asarray(scale).view(np.uint8)
    bad = bits > 0x7E  # 0x7F is NaN; from 0x80 on the sign bit is set
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        kind = "NaN" if bits[where] & 0x7F == 0x7F else "negative"
        raise FormatError(
            f"{name}: block scale at {list(where)} is {kind} (0x{bits[where]:02x}); the file is "
            "damaged or was written by something other than an NVFP4 quantizer"
        )
    values = np.asarray(global_scale, np.float32)
    if not np.all(np.isfinite(values) & (values > 0)):
        raise FormatError(f"{name}: global scale must be finite and positive, found {values}")


def global_scale_of(
    amax: Float[Array, "*stack"], convention: Convention = "modelopt"
) -> Float32[Array, "*stack"]:
    """The global scale that a quantizer derives from the largest magnitude of a matrix.

    ModelOpt takes ``amax / (6 * 448)``, in f32, and multiplies by it. compressed-tensors takes
    ``6 * 448 / amax`` in the dtype of the weights (as ``reciprocal(amax) * 2688``, rounded after
    each step; 1 where that overflows) and divides by it. Either maps ``amax`` to the largest code
    under the largest block scale.

    Args:
      amax: largest magnitude, in the dtype of the weights. Matrices that will be fused share one
        global scale: give the maximum over all of them.
      convention: which tool's arithmetic.

    Returns:
      The number as that tool stores it; 1 where ``amax`` is below :data:`SMALLEST_AMAX`, which
      ModelOpt turns into NaN.
    """
    dtype, amax = amax.dtype, amax.astype(jnp.float32)
    limit = E2M1_MAX * E4M3_MAX
    if _is_divisor(convention):
        tiny = float(jnp.finfo(dtype).tiny)
        reciprocal = round_to(exact_divide(jnp.ones_like(amax), jnp.maximum(amax, tiny)), dtype)
        scale = round_to(reciprocal * limit, dtype)
    else:
        scale = exact_divide(amax, jnp.float32(limit))
    usable = (amax >= SMALLEST_AMAX) & jnp.isfinite(scale)
    return jnp.where(usable, scale, jnp.float32(1))


def quantize(
    w: Float[Array, "*stack n k"],
    *,
    convention: Convention = "modelopt",
    global_scale: Float32[Array, "*#stack"] | None = None,
) -> NVFP4Weight:
    """Quantizes a matrix, or a stack of them, to NVFP4 by round-to-nearest. Jitted.

    Bit for bit what ModelOpt's checkpoint export (``weight``, ``weight_scale``,
    ``weight_scale_2``) or llmcompressor's ``nvfp4-pack-quantized`` (``weight_packed``,
    ``weight_scale``, ``weight_global_scale``) writes for the same matrix, for f32, bf16 and f16
    weights. They differ in more than the meaning of the global scale: compressed-tensors rounds
    intermediate values to the dtype of the weights, and zero blocks get the scale 1 from ModelOpt
    and 0.125 from compressed-tensors. Codes round to nearest, ties to even, and a negative value
    that rounds to zero becomes -0. ModelOpt has no valid output for a zero matrix; it gets zero
    codes here.

    Args:
      w: ``[..., N, K]``, f32, bf16 or f16, finite and below 2**126; K is a multiple of 16.
      convention: ``"modelopt"`` or ``"compressed-tensors"``.
      global_scale: f32 ``[...]``, as the convention stores it; by default from each matrix's own
        amax. Give :func:`global_scale_of` the amax of all partners where several will be fused.

    Returns:
      The weight; ``global_is_divisor`` tells the convention.

    Raises:
      FormatError: K is not a multiple of 16, the dtype is not one of the three, the convention is
        unknown, the global scale does not fit, or (where values are known, so not under a
        transformation) there is a NaN, an infinity or a magnitude from 2**126 on.
    """
    _is_divisor(convention)
    if w.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise FormatError(f"quantize needs f32, bf16 or f16 weights, found {w.dtype}; convert them")
    if w.ndim < 2 or w.shape[-1] % BLOCK_SIZE or not w.size:
        raise FormatError(
            f"quantize needs [..., N, K] with K a positive multiple of {BLOCK_SIZE}, found "
            f"{list(w.shape)}; pad K with zeros or leave this tensor unquantized"
        )
    if global_scale is not None:
        global_scale = jnp.asarray(global_scale, jnp.float32)
        if global_scale.shape not in ((), w.shape[:-2]):
            raise FormatError(
                f"global scale has shape {list(global_scale.shape)}, {list(w.shape)} needs "
                f"{list(w.shape[:-2])} or one for all"
            )
    if not isinstance(w, jax.core.Tracer):
        largest = float(jnp.max(jnp.abs(w)).astype(jnp.float32))
        if not largest < 2.0**126:
            raise FormatError(
                f"quantize needs finite weights below 2**126, found {largest}; the tensor is "
                "damaged, or was read in the wrong dtype"
            )
    return _quantize(w, global_scale, convention)


@functools.partial(jax.jit, static_argnums=2)
def _quantize(w: Array, global_scale: Array | None, convention: Convention) -> NVFP4Weight:
    divisor = _is_divisor(convention)
    stack, (n, k) = w.shape[:-2], w.shape[-2:]
    blocks = w.reshape(*stack, n, k // BLOCK_SIZE, BLOCK_SIZE)
    block_amax = jnp.max(jnp.abs(blocks), axis=-1)
    if global_scale is None:
        global_scale = global_scale_of(jnp.max(block_amax, axis=(-2, -1)), convention)
    global_scale = jnp.broadcast_to(global_scale, stack)
    factor = global_scale[..., None, None]

    amax = block_amax.astype(jnp.float32)
    if divisor:
        scale = factor * round_to(exact_divide(amax, jnp.float32(E2M1_MAX)), w.dtype)
        scale_bits = encode_e4m3(jnp.minimum(scale, E4M3_MAX))
        scale_bits = jnp.where(scale_bits == 0, jnp.uint8(0x20), scale_bits)  # 0.125
    else:
        scale = exact_divide(amax, E2M1_MAX * factor)
        scale_bits = encode_e4m3(jnp.clip(scale, E4M3_TINY, E4M3_MAX))
        scale_bits = jnp.where(is_nonzero(amax), scale_bits, jnp.uint8(0x38))  # 1
    block_scale = jax.lax.bitcast_convert_type(scale_bits, jnp.float8_e4m3fn)

    effective = block_scale.astype(jnp.float32)
    effective = exact_divide(effective, factor) if divisor else effective * factor
    values = blocks.astype(jnp.float32)
    codes = encode_e2m1(exact_divide(jnp.abs(values), effective[..., None]))
    # The sign bit of anything but zero itself: a quotient could have been flushed to zero.
    negative = (jax.lax.bitcast_convert_type(values, jnp.int32) < 0) & is_nonzero(values)
    codes = (codes | (negative.astype(jnp.uint8) << jnp.uint8(3))).reshape(w.shape)
    return NVFP4Weight(pack_codes(codes), block_scale, global_scale, global_is_divisor=divisor)


def _is_divisor(convention: str) -> bool:
    if convention not in ("modelopt", "compressed-tensors"):
        raise FormatError(
            f"unknown convention {convention!r}; use 'modelopt' or 'compressed-tensors'"
        )
    return convention == "compressed-tensors"
