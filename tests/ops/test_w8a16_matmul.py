"""The FP8 matmuls against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from op_reference import error, make_x

from fp4jax.errors import FormatError
from fp4jax.fp8 import E4M3, FP8Weight, make_fp8
from fp4jax.ops.w8a16_matmul import w8a16_grouped_matmul, w8a16_matmul
from fp4jax.ops.w8a16_matmul.xla import widen

BF16 = ml_dtypes.bfloat16
BOUNDS = (
    (np.float32, None, 1e-6),
    (BF16, np.float32, 1e-6),
    (np.float16, np.float32, 1e-6),
    (BF16, None, 2.5e-3),
)
"""dtype of x, of the result, and relative Frobenius error."""


def make_weight(*shape: int, seed: int = 0) -> tuple[np.ndarray, FP8Weight]:
    """A matrix or stack in float64 and as FP8; a tenth of it subnormal, every row its own scale."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.where(rng.random(shape) < 0.1, 0.005, 100)
    stored = values.clip(-448, 448).astype(E4M3)
    scale = (2.0 ** rng.uniform(-12, -4, shape[:-1])).astype(np.float32)
    wide = stored.astype(np.float64) * scale.astype(np.float64)[..., None]
    return wide, make_fp8(jnp.asarray(stored), jnp.asarray(scale))


def test_widening_is_exact_for_every_finite_value():
    codes = np.arange(256, dtype=np.uint8)
    finite = codes[(codes & 0x7F) != 0x7F].view(E4M3)
    found = np.asarray(jax.jit(widen)(jnp.asarray(finite)))
    np.testing.assert_array_equal(found, finite.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(found), finite.view(np.uint8) >= 0x80)


@pytest.mark.parametrize(("n", "k", "lead"), [(48, 64, (3,)), (301, 80, ()), (8, 16, (2, 40))])
@pytest.mark.parametrize(("dtype", "out_dtype", "bound"), BOUNDS)
def test_matches_float64(n, k, lead, dtype, out_dtype, bound):
    wide, w = make_weight(n, k)
    x = make_x(int(np.prod(lead)), k, dtype).reshape(*lead, k)
    bias = np.linspace(-1, 1, n).astype(BF16)
    y = w8a16_matmul(jnp.asarray(x), w, bias=jnp.asarray(bias), out_dtype=out_dtype)
    assert y.dtype == (out_dtype or dtype) and y.shape == (*lead, n)
    wanted = x.astype(np.float64) @ wide.T + bias.astype(np.float64)
    assert error(y, wanted) < bound


@pytest.mark.parametrize("sizes", [(1, 0, 2, 0), (0, 3, 0, 2), (5, 0, 130, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize(("dtype", "out_dtype", "bound"), BOUNDS)
def test_grouped_matches_float64(sizes, dtype, out_dtype, bound):
    wide, w = make_weight(len(sizes), 24, 48)
    total = sum(sizes)
    x = make_x(total + 3, 48, dtype)
    group_sizes = jnp.asarray(sizes, jnp.int32)
    y = w8a16_grouped_matmul(jnp.asarray(x), w, group_sizes, out_dtype=out_dtype)
    assert y.dtype == (out_dtype or dtype)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    wanted = np.zeros((total + 3, 24))
    wanted[:total] = np.einsum("tnk,tk->tn", wide[owner], x[:total].astype(np.float64))
    assert total == 0 or error(y, wanted) < bound
    np.testing.assert_array_equal(np.asarray(y)[total:], 0)


def test_sums_beyond_f16_stay_right():
    w = make_fp8(jnp.full((8, 1024), 448, E4M3), jnp.full(8, 1e-3, jnp.float32))
    y = w8a16_matmul(jnp.full((2, 1024), 60, jnp.float16), w)
    np.testing.assert_allclose(np.asarray(y, np.float32), 448 * 1024 * 60e-3, rtol=1e-3)


@pytest.mark.parametrize("grouped", [False, True])
def test_split_over_a_mesh(grouped):
    """Inside a ``shard_map``, rows of the weight split over devices."""
    _, w = make_weight(*((3,) if grouped else ()), 32, 48)
    x = jnp.asarray(make_x(6, 48, np.float32))
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("model",))
    rows = PartitionSpec(*((None,) if grouped else ()), "model")
    sizes = jnp.asarray([2, 0, 4], jnp.int32)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), rows, rows, PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(None, "model"),
    )
    def local(x, values, scale, fingerprint, sizes):
        part = FP8Weight(values, scale, fingerprint)
        return w8a16_grouped_matmul(x, part, sizes) if grouped else w8a16_matmul(x, part)

    whole = w8a16_grouped_matmul(x, w, sizes) if grouped else w8a16_matmul(x, w)
    found = jax.jit(local)(x, w.values, w.scale, w.fingerprint, sizes)
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5 * float(jnp.abs(whole).max()))


def test_operands_that_do_not_fit():
    _, matrix = make_weight(8, 16)
    _, stack = make_weight(2, 8, 16)
    x, sizes = jnp.ones((4, 16)), jnp.asarray([1, 3], jnp.int32)
    for call, words in (
        (lambda: w8a16_matmul(x[:, :8], matrix), "x must be"),
        (lambda: w8a16_matmul(x.astype(jnp.int32), matrix), "found int32"),
        (lambda: w8a16_matmul(x, stack), "one matrix"),
        (lambda: w8a16_grouped_matmul(x, matrix, sizes), "one stack"),
        (lambda: w8a16_grouped_matmul(x, stack, sizes[:1]), "group_sizes"),
    ):
        with pytest.raises(FormatError, match=words):
            call()
