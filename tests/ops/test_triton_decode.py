"""The GPU kernels' decoding, bit by bit, without a GPU: a few lines here run the PTX itself."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from op_reference import E2M1

from fp4jax.ops.w4a16_matmul.triton_decode import BF16, F16, bf16_parts, operand, plane_ptx

DTYPES = {"bfloat16": (ml_dtypes.bfloat16, 2.0**126), "float16": (np.float16, 2.0**14)}


def run_ptx(text: str, words: np.ndarray) -> np.ndarray:
    """Runs a block of 32-bit PTX instructions on each of ``words`` (u32)."""
    registers = {"$1": words.astype(np.uint64)}

    def read(name: str) -> np.ndarray | int:
        return registers[name] if name in registers else int(name, 0)

    body = text.strip("{} ")
    for line in filter(None, (part.strip() for part in body.split(";"))):
        name, rest = line.split(None, 1)
        target, *sources = [part.strip() for part in rest.split(",")]
        if name == ".reg":
            continue
        a, *more = [read(source) for source in sources]
        if name == "mov.b32":
            value = a
        elif name == "shl.b32":
            value = a << np.uint64(more[0])
        elif name == "shr.b32":
            value = a >> np.uint64(more[0])
        elif name == "and.b32":
            value = a & np.uint64(more[0])
        elif name == "mul.lo.u32":
            value = a * np.uint64(more[0])
        elif name == "lop3.b32":
            assert more[2] == 0xEA  # (a & b) | c
            value = (a & np.uint64(more[0])) | more[1]
        else:
            raise AssertionError(f"unknown instruction {name}")
        registers[target] = value & np.uint64(0xFFFFFFFF)
    return registers["$0"].astype(np.uint32)


@pytest.mark.parametrize("decoder", [BF16, F16], ids=lambda d: d.dtype)
@pytest.mark.parametrize("plane", range(4))
def test_ptx_places_sign_and_magnitude(decoder, plane):
    low = np.arange(1 << 16, dtype=np.uint32)
    high = np.random.default_rng(plane).permutation(low)
    out = run_ptx(plane_ptx(plane, decoder), low | high << 16)
    dtype, scale = DTYPES[decoder.dtype]
    for half, words in ((out & 0xFFFF, low), (out >> 16, high)):
        value = half.astype(np.uint16).view(dtype).astype(np.float64) * scale
        wanted = E2M1[(words >> 4 * plane) & 15]
        np.testing.assert_array_equal(value, wanted)
        np.testing.assert_array_equal(np.signbit(value), np.signbit(wanted))


@pytest.mark.parametrize("decoder", [BF16, F16], ids=lambda d: d.dtype)
def test_operand_is_exact_for_every_code_and_scale(decoder):
    # Row s: one block a plane, all under scale byte s; the 16 words of a row hold every code in
    # every plane. 0x90 is the scale of a zero block.
    code = np.arange(16, dtype=np.uint16)
    word = code | (15 - code) << 4 | (code ^ 5) << 8 | (code ^ 9) << 12
    planes = np.concatenate([code, 15 - code, code ^ 5, code ^ 9])
    scale = np.arange(0x91)
    bytes_ = np.repeat(scale.astype(np.uint8)[:, None], 4, axis=1)
    out = operand(
        jnp.asarray(np.tile(word, (scale.size, 1))), jnp.asarray(bytes_), decoder, interpret=True
    )
    assert out.dtype == decoder.dtype
    value = (1 + scale % 8 / 8) * 2.0 ** (scale // 8 - 9.0)
    wanted = E2M1[planes] * value[:, None]
    np.testing.assert_array_equal(np.asarray(out).astype(np.float64) * decoder.compensation, wanted)


def test_three_parts_give_back_every_f32():
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    x *= np.exp2(np.random.default_rng(1).integers(-60, 60, 4096)).astype(np.float32)
    x[:4] = 0, -0.0, np.float32(2.0**100), np.nextafter(np.float32(1), np.float32(2))
    parts = [np.asarray(part).astype(np.float64) for part in bf16_parts(jnp.asarray(x[None]))]
    np.testing.assert_array_equal(sum(parts)[0], x.astype(np.float64))
    infinite = np.array([[np.inf, -np.inf, np.nan]], np.float32)
    total = sum(np.asarray(part).astype(np.float64) for part in bf16_parts(jnp.asarray(infinite)))
    np.testing.assert_array_equal(total, infinite)
