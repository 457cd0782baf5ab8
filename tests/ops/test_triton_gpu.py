"""The Triton kernels on a GPU against float64, through the public ops."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from op_reference import E2M1, error, grouped_matmul, make_weights, make_x, matmul

from fp4jax.marlin import repack
from fp4jax.nvfp4 import NVFP4Weight
from fp4jax.ops.w4a16_grouped_matmul import explain_grouped, w4a16_grouped_matmul
from fp4jax.ops.w4a16_matmul import explain, w4a16_matmul

pytestmark = pytest.mark.gpu

BF16 = ml_dtypes.bfloat16
F32_BOUND = 5e-6
"""Matrix units add in f32, but not to its last bit."""
BF16_BOUND = 2e-3

dense = functools.partial(w4a16_matmul, implementation="triton")
grouped = functools.partial(w4a16_grouped_matmul, implementation="triton")


def test_the_dispatch_takes_the_kernel():
    _, w = make_weights((64,), 64)
    _, stack = make_weights((64,), 64, stack=(3,))
    x = jnp.asarray(make_x(4, 64, BF16))
    sizes = jnp.asarray([1, 0, 3], jnp.int32)
    assert explain(x, w).choice == "triton"
    assert explain_grouped(x, stack).choice == "triton"
    for text in (
        jax.jit(w4a16_matmul).lower(x, w).as_text(),
        jax.jit(w4a16_grouped_matmul).lower(x, stack, sizes).as_text(),
    ):
        assert text.count("xla.gpu.triton") == 1


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize(
    ("shards", "k", "divisor"),
    [
        ((301,), 16, False),
        ((388,), 48, True),
        ((512, 130, 126), 1856, True),
        ((1024,), 4096, False),
    ],
)
def test_matches_float64(shards, k, divisor, dtype):
    weights, w = make_weights(shards, k, divisor=divisor)
    bias = np.linspace(-1, 1, w.n, dtype=np.float32)
    for m, out, bound in (
        (1, jnp.float32, F32_BOUND),
        (1, jnp.bfloat16, BF16_BOUND),
        (17, jnp.float32, F32_BOUND),
        (48, jnp.float32, F32_BOUND),
        (300, jnp.float32, F32_BOUND),
        (300, jnp.bfloat16, BF16_BOUND),
    ):
        x = make_x(m, k, dtype)
        y = dense(jnp.asarray(x), w, bias=bias, out_dtype=out)
        assert y.dtype == out
        assert error(y, matmul(x, weights, bias)) < bound, (m, out)


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_every_code_under_every_scale_is_exact(dtype):
    # One-hot rows read the decoded matrix out; with a global scale of 1 nothing may round.
    rng = np.random.default_rng(0)
    n, k = 127, 512
    bits = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None], (n, k // 16))  # no NaN
    scale = np.ascontiguousarray(bits).view(ml_dtypes.float8_e4m3fn)
    codes = np.stack([rng.permutation(k) % 16 for _ in range(n)]).astype(np.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    w = repack(NVFP4Weight(packed, scale, np.float32(1)))
    y = dense(jnp.eye(k, dtype=dtype), w, out_dtype=jnp.float32)
    wanted = E2M1[codes] * np.repeat(scale.astype(np.float64), 16, axis=1)
    np.testing.assert_array_equal(np.asarray(y), wanted.T)


def test_sums_may_pass_the_largest_f16():
    weights, w = make_weights((64,), 1024)
    x = np.full((2, 1024), 6e4, np.float16)
    y = dense(jnp.asarray(x), w, out_dtype=jnp.float32)
    assert np.abs(np.asarray(y)).max() > 65504
    assert error(y, matmul(x, weights)) < F32_BOUND


@pytest.mark.parametrize("m", [2, 16, 64, 200])
def test_rows_are_independent_and_results_repeat(m):
    _, w = make_weights((200,), 1856)
    x = make_x(m, 1856, BF16)
    first = np.asarray(dense(jnp.asarray(x), w))
    np.testing.assert_array_equal(first, dense(jnp.asarray(x), w))
    others = np.concatenate([np.full_like(x[:-1], np.nan), x[-1:]])
    np.testing.assert_array_equal(first[-1], np.asarray(dense(jnp.asarray(others), w))[-1])


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_groups_match_float64(dtype):
    experts, k = 6, 1856
    weights, w = make_weights((200, 101), k, stack=(experts,), divisor=True)
    cases = (
        (1, (0, 0, 0, 1, 0, 0)),
        (8, (1, 0, 2, 0, 3, 1)),
        (40, (0, 0, 0, 0, 0, 0)),
        (130, (0, 17, 16, 40, 1, 50)),
        (700, (700, 0, 0, 0, 0, 0)),
        (700, (100, 120, 0, 300, 64, 65)),
    )
    for t, sizes in cases:
        x = make_x(t, k, dtype)
        wanted = grouped_matmul(x, weights, sizes)
        for out, bound in ((jnp.float32, F32_BOUND), (jnp.bfloat16, BF16_BOUND)):
            y = grouped(jnp.asarray(x), w, jnp.asarray(sizes, jnp.int32), out_dtype=out)
            assert error(y, wanted) < bound, (t, sizes, out)
            assert not np.asarray(y)[sum(sizes) :].any()


def test_many_experts_and_other_groups_do_not_matter():
    experts, k = 130, 256
    weights, w = make_weights((128,), k, stack=(experts,))
    sizes = np.bincount(np.random.default_rng(0).integers(0, experts, 90), minlength=experts)
    x = make_x(96, k, BF16)
    y = np.asarray(grouped(jnp.asarray(x), w, jnp.asarray(sizes, jnp.int32), out_dtype=jnp.float32))
    assert error(y, grouped_matmul(x, weights, sizes)) < F32_BOUND
    mine = slice(int(sizes[:50].sum()), int(sizes[:60].sum()))
    others = np.full_like(x, np.nan)
    others[mine] = x[mine]
    again = grouped(jnp.asarray(others), w, jnp.asarray(sizes, jnp.int32), out_dtype=jnp.float32)
    np.testing.assert_array_equal(y[mine], np.asarray(again)[mine])
