"""NVFP4, the number format: 4-bit e2m1 codes, an e4m3 scale a block of 16, one f32 global scale.

This module is the definition, in plain ``jax.numpy``: what the bits mean, how two public
quantizers make them, and nothing about how a kernel wants them laid out (that is
:mod:`fp4jax.marlin`).

Sources: the OCP Microscaling specification v1.0 (e2m1, e4m3), NVIDIA's NVFP4 description, and
the files that ``nvidia-modelopt`` and ``compressed-tensors`` write.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float8e4m3fn, Float32, UInt8

from fp4jax.errors import FormatError

BLOCK_SIZE = 16
"""Elements along K that share one block scale."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0

# Python floats, not an array: a module holds no device state.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
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
    return codes[..., 0::2] | (codes[..., 1::2] << jnp.uint8(4))


def decode_e2m1(codes: UInt8[Array, "*shape"], dtype=jnp.float32) -> Float[Array, "*shape"]:
    """The value of each 4-bit code (upper bits must be 0), by table, -0 kept."""
    return jnp.asarray(E2M1_VALUES, dtype)[codes]


def effective_scale(weight: NVFP4Weight) -> Float32[Array, "*stack n groups"]:
    """f32 scale of each block, the global scale applied the way the checkpoint means it."""
    scale = weight.scale.astype(jnp.float32)
    global_scale = weight.global_scale[..., None, None]
    return scale / global_scale if weight.global_is_divisor else scale * global_scale


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
        raise FormatError(f"{name}: K = {weight.k} is not a multiple of the block size {BLOCK_SIZE}")
    want = (*packed.shape[:-1], weight.k // BLOCK_SIZE)
    if scale.shape != want:
        raise FormatError(
            f"{name}: block scales have shape {scale.shape}, packed codes {packed.shape} need {want}"
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
