"""The number format against other tools' bits, and against NumPy."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4jax import nvfp4
from fp4jax.errors import FormatError
from fp4jax.nvfp4 import NVFP4Weight

F8 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
CONVENTIONS = ("modelopt", "compressed-tensors")
STORED = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
}
CASES = (
    *("normal.0", "odd_rows.0", "fused.0", "fused.1", "ties.0", "block_scales.0", "zeros.0"),
    *("all_zero.0", "huge.0", "small.0", "half_max.0", "half_small.0", "wide.0"),
)
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    """What other quantizers wrote; see ``data/nvfp4/make_reference.py``."""
    with np.load(Path(__file__).parent / "data" / "nvfp4" / "reference.npz") as file:
        return {name: file[name] for name in file.files}


def stored_weight(data: dict, case: str, dtype: str) -> np.ndarray | None:
    """The input of a case, None where the dtype cannot hold it."""
    found = data.get(f"{case}.{dtype}/weight")
    return found.view(BF16) if found is not None and dtype == "bf16" else found


def expected(data: dict, case: str, dtype: str, convention: str):
    """A tool's stored tensors and its dequantization of them, None where it has none."""
    prefix = f"{case}.{dtype}/{convention}"
    if f"{prefix}/dequantized" not in data:
        return None
    packed, scale, global_scale = (data[f"{prefix}/{name}"] for name in STORED[convention])
    weight = NVFP4Weight(
        packed, scale.view(F8), global_scale.reshape(()), convention == "compressed-tensors"
    )
    return weight, data[f"{prefix}/dequantized"]


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def assert_same_weight(found: NVFP4Weight, want: NVFP4Weight) -> None:
    assert found.global_is_divisor == want.global_is_divisor
    for name in ("global_scale", "scale", "packed"):
        np.testing.assert_array_equal(
            bits(getattr(found, name)), bits(getattr(want, name)), err_msg=name
        )


def make_weight(n=3, k=32, stack=(), seed=0) -> NVFP4Weight:
    """Random valid arrays on the host."""
    rng = np.random.default_rng(seed)
    scale = rng.integers(0, 0x7F, (*stack, n, k // 16), dtype=np.uint8).view(F8)
    packed = rng.integers(0, 256, (*stack, n, k // 2), dtype=np.uint8)
    return NVFP4Weight(packed, scale, np.asarray(rng.uniform(0.5, 2, stack), np.float32))


# Codes.


def test_codes_pack_low_nibble_first():
    codes = np.arange(16, dtype=np.uint8)
    packed = nvfp4.pack_codes(jnp.asarray(codes))
    np.testing.assert_array_equal(packed, [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])
    every_byte = np.arange(256, dtype=np.uint8).reshape(2, 8, 16)
    pairs = nvfp4.unpack_codes(jnp.asarray(every_byte))
    assert pairs.shape == (2, 8, 32)
    np.testing.assert_array_equal(pairs[..., 0::2], every_byte % 16)
    np.testing.assert_array_equal(pairs[..., 1::2], every_byte // 16)
    np.testing.assert_array_equal(nvfp4.pack_codes(pairs), every_byte)


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
def test_each_code_has_its_value(dtype):
    values = np.asarray(nvfp4.decode_e2m1(jnp.arange(16, dtype=jnp.uint8), dtype))
    assert values.dtype == dtype
    # ml_dtypes' own 4-bit float, an independent table; -0 is the code 8.
    want = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(dtype)
    np.testing.assert_array_equal(bits(values), bits(want))
    assert np.signbit(values[8].astype(np.float32))


# Other tools' bits.


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("case", CASES)
def test_quantize_writes_what_the_tools_write(reference, case, dtype):
    w = stored_weight(reference, case, dtype)
    if w is None:
        assert (case, dtype) in {("huge.0", "f16"), ("small.0", "f16")}  # out of its range
        return
    for convention in CONVENTIONS:
        want = expected(reference, case, dtype, convention)
        if want is None:
            assert (case, convention) == ("all_zero.0", "modelopt")  # it writes NaN
            continue
        global_scale = None
        if case.startswith("fused"):
            both = [np.abs(stored_weight(reference, f"fused.{i}", dtype)).max() for i in (0, 1)]
            global_scale = nvfp4.global_scale_of(jnp.maximum(*both), convention)
        # Rows of zeros change nothing for the others; few shapes are few compilations.
        rows = {16: 301, 32: 16, 64: 24}[w.shape[1]]
        padded = jnp.zeros((rows, w.shape[1]), w.dtype).at[: len(w)].set(w)
        found = nvfp4.quantize(padded, convention=convention, global_scale=global_scale)
        nvfp4.validate(found)
        cut = dataclasses.replace(found, packed=found.packed[: len(w)], scale=found.scale[: len(w)])
        assert_same_weight(cut, want[0])


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_dequantize_equals_the_tools_own(reference, convention, dtype):
    seen = 0
    for case in ("normal.0", "odd_rows.0", "block_scales.0", "wide.0"):
        weight, want = expected(reference, case, dtype, convention)
        # Values, not bits: ModelOpt reads the code of -0 as 0.
        found = nvfp4.dequantize(jax.tree.map(jnp.asarray, weight))
        np.testing.assert_array_equal(found, want)
        seen += np.count_nonzero(want)
    assert seen > 5000


def test_the_reference_holds_what_it_is_there_for(reference):
    codes, scales = set(), set()
    for case in CASES:
        for convention in CONVENTIONS:
            if (want := expected(reference, case, "f32", convention)) is not None:
                codes |= set((want[0].packed & 15).ravel()) | set((want[0].packed >> 4).ravel())
                scales |= set(bits(want[0].scale).ravel())
    assert codes == set(range(16))
    assert set(range(1, 9)) <= scales  # e4m3's subnormals
    assert 0x7E in scales  # and its largest
    zeros = stored_weight(reference, "zeros.0", "f32")
    assert np.any(np.signbit(zeros) & (zeros == 0))


# NumPy's divisions are IEEE 754's, so this needs none of the care that XLA needs.


def quantize_numpy(w: np.ndarray, convention: str) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Signed values of the codes, block scales and the global scale of one matrix."""
    dtype = w.dtype
    amax = np.abs(w).max()
    block_amax = np.abs(w).reshape(len(w), -1, 16).max(-1)
    with np.errstate(over="ignore"):
        if convention == "modelopt":
            global_scale = np.float32(amax) / np.float32(2688)
            scale = block_amax.astype(np.float32) / (np.float32(6) * global_scale)
            scale = np.where(block_amax == 0, np.float32(1), scale.clip(2**-9, 448)).astype(F8)
            effective = scale.astype(np.float32) * global_scale
        else:
            # Each operation is rounded to the dtype of the weights.
            global_scale = np.float32(dtype.type(1) / amax * dtype.type(2688))
            global_scale = global_scale if np.isfinite(global_scale) else np.float32(1)
            scale = (block_amax / dtype.type(6)).astype(np.float32) * global_scale
            scale = scale.clip(0, 448).astype(F8)
            scale = np.where(scale == 0, F8(0.125), scale)
            effective = scale.astype(np.float32) / global_scale
    quotient = w.astype(np.float32) / np.repeat(effective, 16, axis=1)
    distance = np.abs(np.abs(quotient.astype(np.float64))[..., None] - MAGNITUDES)
    # Nearest, and of two equally near ones the even code.
    order = np.arange(8) % 2
    code = np.argmin(distance + 1e-12 * order * (distance == distance.min(-1, keepdims=True)), -1)
    return np.where(quotient < 0, -1.0, 1.0) * MAGNITUDES[code], scale, global_scale


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([np.float32, BF16, np.float16]),
    convention=st.sampled_from(CONVENTIONS),
    spread=st.sampled_from([0.0, 2.0, 6.0]),
    size=st.floats(-4, 4),
)
def test_quantize_equals_numpy(seed, dtype, convention, spread, size):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((40, 64)) * np.exp2(rng.normal(0, spread, (40, 64)))
    w = (w * 10.0**size / np.abs(w).max()).astype(dtype)
    found = nvfp4.quantize(jnp.asarray(w), convention=convention)
    values, scale, global_scale = quantize_numpy(w, convention)
    assert bits(found.global_scale) == bits(global_scale)
    np.testing.assert_array_equal(bits(found.scale), bits(scale))
    codes = np.asarray(nvfp4.decode_e2m1(nvfp4.unpack_codes(found.packed)))
    np.testing.assert_array_equal(codes, values)
    np.testing.assert_array_equal(np.signbit(codes), np.signbit(values))


# Other ways to call quantize.


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_stack_is_quantized_matrix_by_matrix(convention):
    w = np.random.default_rng(1).standard_normal((2, 3, 5, 32)).astype(np.float32)
    w *= np.array([1, 10, 100], np.float32)[:, None, None]
    quantize = functools.partial(nvfp4.quantize, convention=convention)
    together = quantize(jnp.asarray(w))
    assert together.shape == w.shape
    assert together.global_scale.shape == (2, 3)
    mapped = jax.vmap(jax.vmap(quantize))(jnp.asarray(w))
    assert_same_weight(mapped, together)
    for i, j in np.ndindex(2, 3):
        one = jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], together)
        assert_same_weight(one, quantize(jnp.asarray(w[i, j])))


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_jit_does_not_change_a_bit(reference, convention):
    w = jnp.asarray(stored_weight(reference, "zeros.0", "bf16"))

    def round_trip(w):
        return nvfp4.dequantize(nvfp4.quantize(w * jnp.bfloat16(0.75), convention=convention))

    # Step by step, and compiled as one: what XLA fuses or rewrites differs.
    np.testing.assert_array_equal(bits(jax.jit(round_trip)(w)), bits(round_trip(w)))


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_nothing_to_quantize_becomes_zeros(convention):
    w = jnp.full((2, 16), -(2.0**-106), jnp.float32).at[0].set(0)
    weight = nvfp4.quantize(w, convention=convention)
    nvfp4.validate(weight)
    assert weight.global_scale == 1
    values = np.asarray(nvfp4.dequantize(weight))
    np.testing.assert_array_equal(values, np.zeros((2, 16)))
    np.testing.assert_array_equal(np.signbit(values), [[False] * 16, [True] * 16])


def test_fused_partners_share_the_largest_scale():
    amax = jnp.asarray([0.5, 2.0, 0.0], jnp.float32)
    np.testing.assert_array_equal(
        nvfp4.global_scale_of(amax), np.array([0.5, 2, 2688], np.float32) / np.float32(2688)
    )
    np.testing.assert_array_equal(
        nvfp4.global_scale_of(amax, "compressed-tensors"), [5376, 1344, 1]
    )
    w = jnp.ones((2, 32))
    scale = nvfp4.global_scale_of(jnp.float32(1e4))
    for shaped in (scale, scale[None]):
        stack = w if shaped.ndim == 0 else w[None]
        assert np.all(nvfp4.quantize(stack, global_scale=shaped).global_scale == scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": jnp.ones((4, 24))}, r"multiple of 16, found \[4, 24\]; pad K"),
        ({"w": jnp.ones(16)}, r"\[\.\.\., N, K\]"),
        ({"w": jnp.ones((0, 16))}, r"found \[0, 16\]"),
        ({"w": jnp.ones((4, 16), jnp.int8)}, "found int8; convert"),
        ({"w": jnp.ones((4, 16), jnp.float8_e4m3fn)}, "found float8_e4m3fn"),
        ({"w": jnp.ones((4, 16)).at[1, 2].set(jnp.nan)}, "finite weights below .* found nan"),
        ({"w": jnp.ones((4, 16)).at[1, 2].set(-jnp.inf)}, "found inf"),
        ({"w": jnp.ones((4, 16)).at[1, 2].set(2.0**126)}, "found 8.5"),
        ({"convention": "gguf"}, "unknown convention 'gguf'; use"),
        ({"global_scale": jnp.ones(3)}, r"shape \[3\], \[4, 16\] needs \[\]"),
    ],
)
def test_quantize_says_what_is_wrong(change, message):
    arguments = {"w": jnp.ones((4, 16), jnp.float32), **change}
    with pytest.raises(FormatError, match=message):
        nvfp4.quantize(arguments.pop("w"), **arguments)


def test_traced_weights_are_not_looked_at():
    def loss(w):
        return nvfp4.quantize(w).scale

    assert jax.eval_shape(loss, jax.ShapeDtypeStruct((4, 32), jnp.bfloat16)).shape == (4, 2)
    with pytest.raises(FormatError, match="multiple of 16"):
        jax.eval_shape(loss, jax.ShapeDtypeStruct((4, 33), jnp.bfloat16))


# The stored weight.


def test_sizes():
    weight = make_weight(301, 48, (2,))
    assert (weight.n, weight.k, weight.shape) == (301, 48, (2, 301, 48))
    assert weight.nbytes == 2 * (301 * 24 + 301 * 3 + 4)


def test_dequantize_decodes_every_code_and_scale():
    codes = np.tile(np.arange(16, dtype=np.uint8), (127, 1))
    scale = np.arange(127, dtype=np.uint8)[:, None].view(F8)  # all finite non-negative e4m3
    for divisor in (False, True):
        weight = NVFP4Weight(
            np.asarray(nvfp4.pack_codes(jnp.asarray(codes))), scale, np.float32(0.3), divisor
        )
        found = np.asarray(nvfp4.dequantize(jax.tree.map(jnp.asarray, weight)))
        wide = scale.astype(np.float32)
        block = wide / np.float32(0.3) if divisor else wide * np.float32(0.3)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        np.testing.assert_array_equal(bits(found), bits(values * block))


def test_canonicalize_clears_dead_magnitudes_only():
    weight = make_weight(4, 64)
    scale = weight.scale.copy()
    scale[1, 2] = scale[3, 0] = 0
    weight = dataclasses.replace(weight, scale=scale)
    clean = nvfp4.canonicalize(jax.tree.map(jnp.asarray, weight))
    codes = np.asarray(nvfp4.unpack_codes(clean.packed)).reshape(4, 4, 16)
    before = np.asarray(nvfp4.unpack_codes(jnp.asarray(weight.packed))).reshape(4, 4, 16)
    dead = np.zeros((4, 4), bool)
    dead[1, 2] = dead[3, 0] = True
    np.testing.assert_array_equal(dead, np.asarray(scale == 0))
    np.testing.assert_array_equal(codes[dead], before[dead] & 8)
    np.testing.assert_array_equal(codes[~dead], before[~dead])
    assert np.any(before[dead] != codes[dead])
    np.testing.assert_array_equal(
        bits(nvfp4.dequantize(clean)), bits(nvfp4.dequantize(jax.tree.map(jnp.asarray, weight)))
    )


def damaged(**fields) -> NVFP4Weight:
    return dataclasses.replace(make_weight(), **fields)


def with_scale_bits(index, value) -> np.ndarray:
    changed = make_weight().scale.view(np.uint8).copy()
    changed[index] = value
    return changed.view(F8)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (damaged(packed=np.zeros((3, 16), np.int8)), "uint8.*found int8"),
        (damaged(scale=np.ones((3, 2), np.float16)), "float8_e4m3fn, found float16"),
        (damaged(packed=np.zeros(16, np.uint8)), r"\[\.\.\., N, K/2\]"),
        (damaged(packed=np.zeros((3, 12), np.uint8)), "K = 24 is not a multiple"),
        (damaged(scale=np.ones((3, 1), F8)), r"shape \(3, 1\).*need \(3, 2\)"),
        (damaged(global_scale=np.ones(1, np.float32)), r"shape \(1,\), needs \(\)"),
        (damaged(scale=with_scale_bits((1, 1), 0x7F)), r"\[1, 1\] is NaN \(0x7f\)"),
        (damaged(scale=with_scale_bits((2, 0), 0xFF)), r"\[2, 0\] is NaN \(0xff\)"),
        (damaged(scale=with_scale_bits((0, 1), 0xB8)), r"\[0, 1\] is negative \(0xb8\)"),
        (damaged(scale=with_scale_bits((0, 1), 0x80)), r"\[0, 1\] is negative \(0x80\)"),
        (damaged(global_scale=np.float32(0)), "finite and positive, found 0"),
        (damaged(global_scale=np.float32(-1)), "finite and positive, found -1"),
        (damaged(global_scale=np.float32("inf")), "finite and positive, found inf"),
        (damaged(global_scale=np.float32("nan")), "finite and positive, found nan"),
    ],
)
def test_validate_names_the_tensor_and_the_fault(weight, message):
    with pytest.raises(FormatError, match=rf"^layers\.0\.weight: .*{message}"):
        nvfp4.validate(weight, "layers.0.weight")


def test_validate_accepts_host_and_device_arrays():
    for stack in ((), (2, 2)):
        weight = make_weight(stack=stack)
        nvfp4.validate(weight)
        nvfp4.validate(jax.tree.map(jnp.asarray, weight))
