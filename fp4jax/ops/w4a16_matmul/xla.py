"""W4A16 matmul in plain XLA: any backend, any shape.

Two formulations, chosen by the (static) number of rows:

* few rows on a CPU: one fused loop that decodes words in registers and multiplies, so that a
  decode step streams 4.5 bits a weight and never writes a decoded matrix;
* otherwise: decode once to ``x``'s dtype, then an ordinary dot; on a CPU a block of rows at a
  time (:mod:`fp4jax.ops.row_blocks`).

How the fused loop is shaped for XLA's CPU backend (read off its LLVM output, jaxlib 0.10):

* it does not reassociate float adds, so a sum along the minor axis stays scalar. The layout puts
  16 neighbouring k in 16 neighbouring words; those 16 are kept as the minor axis of the partial
  sums and everything else is an unrolled chain of adds, which vectorizes over them;
* four accumulators, one a nibble, hide the latency of the multiply-adds;
* a float ``reduce`` would be handed to a library together with the products before it, and the
  operands written out for it; a dot with ones takes only the partial sums;
* a fusion whose result is reshaped is looped over in the new shape, and index arithmetic in the
  minor axis ends vectorization: only leading axes are merged.

The words pass an optimization barrier together with ``x``. A decode depends on weights only, so
inside a generation loop it is loop-invariant and XLA would otherwise hoist it, and with it keep
a decoded copy of the model.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, UInt8, UInt16

from fp4jax import marlin
from fp4jax.ops.row_blocks import by_row_blocks

FUSED_ROWS = 8
"""Most rows that the fused CPU loop serves; it decodes once a row."""

TILE = marlin.K_MULTIPLE
LANES = 16
_UNROLL = 4
_UNROLL_WIDE = 12
_WIDE_ROWS = 8192
# f16 bits s0ee_m... would hold e2m1 at exponent bias 1 instead of 15: value * 2^-14.
_F16_MASK = 0x8E00 - 0x10000
_SCALE_EXPONENT = (127 - 9 + 14) << 23


def unsupported_reason(spec: object) -> str | None:
    """Why this implementation cannot serve ``spec``: never, it serves everything."""
    del spec
    return None


def _plane(words: UInt16[Array, "*shape"], j: int) -> Float32[Array, "*shape"]:
    """Nibble j of each word as its e2m1 value times 2^-14, exactly (also 0.5, which needs f16's
    subnormals: the conversion keeps them where f32 arithmetic on this backend would not)."""
    bits = lax.bitcast_convert_type(words, jnp.int16)
    if j < 3:
        bits = bits << jnp.int16(12 - 4 * j)
    # The arithmetic shift leaves the sign in bit 15 and the magnitude in bits 11..9.
    bits = (bits >> jnp.int16(3)) & jnp.int16(_F16_MASK)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def _scales(scales: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """S0E5M3 bytes to f32, times 2^14."""
    bits = (scales.astype(jnp.uint32) << 20) + jnp.uint32(_SCALE_EXPONENT)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _sum(terms: list[Array]) -> Array:
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        terms = [a + b for a, b in pairs] + terms[len(terms) // 2 * 2 :]
    return terms[0]


def _segments(tiles: int, rows: int) -> list[tuple[int, int, int]]:
    """Splits K into ``(first tile, segments, tiles a segment)``: one fused loop each.

    Short segments keep the unrolled body, hence compile time, small; many rows take long ones,
    because a segment writes 16 partial sums a row.
    """
    most = _UNROLL_WIDE if rows >= _WIDE_ROWS else _UNROLL
    if tiles <= most:
        return [(0, 1, tiles)]
    for per in range(most, most // 2, -1):
        if tiles % per == 0:
            return [(0, tiles // per, per)]
    whole = tiles // most * most
    return [(0, tiles // most, most), (whole, 1, tiles - whole)]


def fused_rows(
    x: Float[Array, "m k"], words: UInt16[Array, "b rows words"], scales: UInt8[Array, "b rows g"]
) -> Float32[Array, "m rows"]:
    """``sum_k x[m, k] * code * block scale`` without the global scale, decoded in registers.

    Args:
      x: any float dtype; multiplied in f32.
      words, scales: arrays of a :class:`fp4jax.marlin.MarlinWeight`; b is 1 (one matrix for all
        rows of x) or m (a matrix a row).

    Returns:
      f32, padding rows included; each row is the same whatever rows are beside it.
    """
    m = x.shape[0]
    b, rows, width = words.shape
    tiles = width // LANES
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, tiles * TILE - x.shape[1])))
    x = x.reshape(m, 1, tiles, 4, LANES)
    words = words.reshape(b, rows, tiles, LANES)
    scale = _scales(scales[..., : 4 * tiles]).reshape(b, rows, tiles, 4)
    parts = []
    for start, count, per in _segments(tiles, rows):
        stop = start + count * per
        ws = words[:, :, start:stop].reshape(b, rows, count, per, LANES)
        ss = scale[:, :, start:stop].reshape(b, rows, count, per, 4, 1)
        xs = x[:, :, start:stop].reshape(m, 1, count, per, 4, LANES)
        planes = [
            _sum_in_order(
                [
                    _plane(ws[:, :, :, t], j) * ss[:, :, :, t, j] * xs[:, :, :, t, j]
                    for t in range(per)
                ]
            )
            for j in range(4)
        ]
        lanes = _sum(planes).reshape(m * rows * count, LANES)
        totals = _row_sums(lanes).reshape(m, rows, count)
        if count > 8:
            parts.append(_row_sums(totals.reshape(m * rows, count)).reshape(m, rows))
        else:
            parts += [totals[:, :, i] for i in range(count)]
    return _sum(parts)


def _sum_in_order(terms: list[Array]) -> Array:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _row_sums(values: Float32[Array, "r c"]) -> Float32[Array, " r"]:
    ones = jnp.ones(values.shape[1], jnp.float32)
    return jnp.dot(values, ones, precision=lax.Precision.HIGHEST)


def decode_fast(words: Array, scales: Array, dtype) -> Float[Array, "rows k_pad"]:
    """One matrix's code times block scale, padding included; exact in f32, bf16 and f16."""
    rows, width = words.shape
    tiles = width // LANES
    # A multiply, since a shift by a vector of amounts is guarded by branches.
    lift = jnp.asarray([4096, 256, 16, 1], jnp.int16)[:, None]
    bits = lax.bitcast_convert_type(words, jnp.int16).reshape(rows, tiles, 1, LANES) * lift
    scale = _scales(scales[:, : 4 * tiles]).reshape(rows, tiles, 4, 1)
    values = _plane(lax.bitcast_convert_type(bits, jnp.uint16), 3) * scale
    return values.reshape(rows, tiles * TILE).astype(dtype)


def decoded_dot(x: Float[Array, "m k"], decoded: Float[Array, "n k"]) -> Float32[Array, "m n"]:
    """``x @ decoded.T`` accumulated in f32; f32 operands at full precision."""
    return lax.dot_general(
        x,
        decoded,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _accumulate_cpu(x: Array, w: marlin.MarlinWeight) -> Array:
    if x.shape[0] <= FUSED_ROWS:
        return fused_rows(x, w.words[None], w.scales[None])[:, : w.n]
    if x.dtype == jnp.float16:  # the CPU has no fast f16 dot
        x = x.astype(jnp.float32)

    def multiply(x: Array, words: Array, scales: Array) -> Array:
        return decoded_dot(x, decode_fast(words, scales, x.dtype)[:, : w.k])

    return by_row_blocks(multiply, x, w.words, w.scales)[:, : w.n]


def _accumulate(x: Array, w: marlin.MarlinWeight) -> Array:
    return decoded_dot(x, marlin.decode(w, x.dtype))


def matmul_xla(
    x: Float[Array, "m k"],
    w: marlin.MarlinWeight,
    *,
    bias: Float[Array, " n"] | None = None,
    out_dtype,
) -> Float[Array, "m n"]:
    """``x @ w.T (+ bias)``, accumulated in f32, cast once at the end.

    Args:
      x: bf16, f16 or f32.
      w: one matrix (no stack).
      bias: added in f32, after the global scale.
      out_dtype: dtype of the result.
    """
    x, w = lax.optimization_barrier((x, w))
    out = lax.platform_dependent(x, w, cpu=_accumulate_cpu, default=_accumulate)
    out = marlin.apply_global_scale(w, out)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(out_dtype)
