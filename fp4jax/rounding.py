"""Rounding and division that give the same bits on every backend.

XLA may rewrite a division, elide a pair of converts, flush subnormals or round twice on the way
to an 8-bit float. A quantizer whose output is compared bit for bit can afford none of that, so
its few operations are here, in integers where that is the only way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt8, UInt32

E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; odd positions round up."""


def exact_divide(a: Float32[Array, "*s"], b: Float32[Array, "*#s"]) -> Float32[Array, "*s"]:
    """``a / b`` as IEEE 754 rounds it, on every backend, jitted or not; ``b`` is positive.

    A backend's own quotient can be a few units in the last place off: GPUs divide that way, and
    XLA turns ``x / c`` and ``x / broadcast(y)`` into products with a reciprocal. Operands and
    quotients outside f32's normal range are left to the backend.
    """
    b = jnp.broadcast_to(b, a.shape)
    magnitude = jnp.abs(a)
    (a_part, a_exponent), (b_part, b_exponent) = _parts(magnitude), _parts(b)
    quotient = correct_quotient(a_part, b_part, a_part / b_part)
    shift = a_exponent - b_exponent
    exact = quotient * _power_of_two(shift // 2) * _power_of_two(shift - shift // 2)
    tiny = jnp.finfo(jnp.float32).tiny
    usable = (magnitude >= tiny) & (magnitude < jnp.inf) & (b >= tiny) & (b < jnp.inf)
    return jnp.copysign(jnp.where(usable, exact, magnitude / b), a)


def correct_quotient(
    a: Float32[Array, "*s"], b: Float32[Array, "*s"], quotient: Float32[Array, "*s"]
) -> Float32[Array, "*s"]:
    """``a / b`` rounded to nearest, of values in [1, 2), from a quotient a few units off."""
    # Off by less than one unit afterwards, so that the next remainder is exact.
    near = quotient + _remainder(a, b, quotient) / b
    rest = _remainder(a, b, near)
    bits = jax.lax.bitcast_convert_type(near, jnp.uint32)
    power = jax.lax.bitcast_convert_type(bits & jnp.uint32(0x7F800000), jnp.float32)
    half = power * b * 2.0**-24  # half a unit of ``near``, times b; exact, as is the comparison
    # Below a power of two the units are half as large. (No quotient lies midway.)
    half_below = jnp.where(bits & jnp.uint32(0x007FFFFF) == 0, half * 0.5, half)
    bits = bits + (rest > half).astype(jnp.uint32) - (rest < -half_below).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _parts(x: Float32[Array, "*s"]) -> tuple[Float32[Array, "*s"], Int32[Array, "*s"]]:
    """Mantissa in [1, 2) and exponent of normal positive values."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    mantissa = (bits & jnp.int32(0x007FFFFF)) | jnp.int32(127 << 23)
    return jax.lax.bitcast_convert_type(mantissa, jnp.float32), (bits >> 23) - 127


def _power_of_two(exponent: Int32[Array, "*s"]) -> Float32[Array, "*s"]:
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _remainder(
    a: Float32[Array, "*s"], b: Float32[Array, "*s"], quotient: Float32[Array, "*s"]
) -> Float32[Array, "*s"]:
    """``a - quotient * b``, from products of 12-bit halves, each exact (Dekker 1971)."""
    b_high, b_low = _halves(b)
    q_high, q_low = _halves(quotient)
    return a - q_high * b_high - q_high * b_low - q_low * b_high - q_low * b_low


def _halves(x: Float32[Array, "*s"]) -> tuple[Float32[Array, "*s"], Float32[Array, "*s"]]:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high


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
