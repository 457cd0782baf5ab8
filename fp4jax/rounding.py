"""Rounding and division that give the same bits on every backend.

XLA may rewrite a division, elide a pair of converts, flush subnormals or round twice on the way
to an 8-bit float. A quantizer whose output is compared bit for bit can afford none of that, so
its few operations are here, in integers where that is the only way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, UInt8, UInt32

E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; odd positions round up."""


def exact_divide(a: Float32[Array, "*s"], b: Float32[Array, "*#s"]) -> Float32[Array, "*s"]:
    """``a / b`` as IEEE 754 rounds it, jitted or not.

    XLA turns ``x / c`` and ``x / broadcast(y)`` into products with a reciprocal, and
    ``x / (s / g)`` into ``(x * g) / s``. A divisor that depends on the dividend, if only formally,
    is neither. (An optimization barrier would be lost on a divisor that ``vmap`` broadcasts.)
    """
    return a / jnp.where(jnp.isnan(a), a, b)


def is_nonzero(x: Float32[Array, "*s"]) -> Bool[Array, "*s"]:
    """Whether each value is not 0, from the bits: the CPU backend compares subnormals as 0."""
    return jax.lax.bitcast_convert_type(x, jnp.uint32) << 1 != 0


def round_to(x: Float32[Array, "*s"], dtype) -> Float32[Array, "*s"]:
    """Non-negative values rounded to those of ``dtype`` (f32, bf16 or f16), kept in f32.

    bf16's subnormals round to 0. Overflow gives infinity.
    """
    if dtype == jnp.float32:
        return x
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    if dtype != jnp.float16:
        return rounded
    # reduce_precision has no subnormals; f16's are multiples of 2**-24, f32's step from 0.5 on.
    steps = _steps_above(x, 0.5).astype(jnp.float32)
    return jnp.where(x < float(info.tiny), steps * 2.0**-24, rounded)


def encode_e4m3(x: Float32[Array, "*s"]) -> UInt8[Array, "*s"]:
    """Bits of values in [0, 448] rounded to e4m3, ties to even (OCP 8-bit floating point v1.0).

    A backend's own convert from f32 may go through f16 and round twice.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    even = (bits >> 20) & 1
    normal = ((bits + even + 0x7FFFF) >> 20) - ((127 - 7) << 3)
    subnormal = _steps_above(x, 2.0**14)  # where f32's step is 2**-9
    return jnp.where(x < 2.0**-6, subnormal, normal).astype(jnp.uint8)


def encode_e2m1(magnitude: Float32[Array, "*s"]) -> UInt8[Array, "*s"]:
    """Code 0..7 of the nearest e2m1 magnitude, ties to the even code, saturating at 6."""
    code = jnp.zeros(magnitude.shape, jnp.uint8)
    for i, tie in enumerate(E2M1_TIES):
        above = magnitude >= tie if i % 2 else magnitude > tie
        code += above.astype(jnp.uint8)
    return code


def _steps_above(x: Float32[Array, "*s"], base: float) -> UInt32[Array, "*s"]:
    """``x`` (small beside ``base``) in units of the last place of ``base``, ties to even."""
    bits = jax.lax.bitcast_convert_type(x + base, jnp.uint32)
    return bits - jax.lax.bitcast_convert_type(jnp.float32(base), jnp.uint32)
