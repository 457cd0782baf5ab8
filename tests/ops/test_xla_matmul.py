"""The XLA form of the W4A16 matmul against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from op_reference import error, make_weights, make_x, matmul

from fp4jax.errors import FormatError, UnsupportedError
from fp4jax.ops.w4a16_matmul import explain, w4a16_matmul
from fp4jax.ops.w4a16_matmul.xla import FUSED_ROWS

BF16 = ml_dtypes.bfloat16

SHAPES = (
    # M, shards, K: the fused loop's one, some and most rows; the decoding form; odd N; long K
    (1, (64,), 64),
    (3, (301,), 16),
    (FUSED_ROWS, (48, 16, 16), 1856),
    (FUSED_ROWS + 1, (388,), 272),
    (70, (24, 40), 576),
)


@pytest.mark.parametrize("divisor", [False, True])
@pytest.mark.parametrize(("m", "shards", "k"), SHAPES)
def test_matches_float64(m, shards, k, divisor):
    weights, w = make_weights(shards, k, divisor=divisor)
    bias = np.linspace(-1, 1, w.n, dtype=np.float32)
    for dtype, out_dtype, bound in (
        (np.float32, None, 1e-6),
        (BF16, np.float32, 1e-6),
        (np.float16, np.float32, 1e-6),
        (BF16, None, 2.5e-3),
    ):
        x = make_x(m, k, dtype)
        y = w4a16_matmul(jnp.asarray(x), w, bias=bias, out_dtype=out_dtype, implementation="xla")
        assert y.dtype == (out_dtype or dtype)
        assert error(y, matmul(x, weights, bias)) < bound, (dtype, out_dtype)


def test_leading_axes_and_empty_ones():
    weights, w = make_weights((24,), 32)
    x = make_x(6, 32, np.float32)
    flat = np.asarray(w4a16_matmul(x, w))
    np.testing.assert_array_equal(w4a16_matmul(x.reshape(2, 3, 32), w).reshape(6, 24), flat)
    np.testing.assert_array_equal(w4a16_matmul(x[0], w), w4a16_matmul(x[:1], w)[0])
    assert w4a16_matmul(x[:0], w).shape == (0, 24)
    assert error(flat, matmul(x, weights)) < 1e-6


def test_sums_may_pass_the_largest_f16():
    weights, w = make_weights((16,), 256)
    x = np.full((2, 256), 6e4, np.float16)
    y = w4a16_matmul(jnp.asarray(x), w, out_dtype=jnp.float32)
    assert np.abs(np.asarray(y)).max() > 65504
    assert error(y, matmul(x, weights)) < 1e-6


@pytest.mark.parametrize("m", [2, 40])
def test_a_row_does_not_depend_on_its_neighbours(m):
    _, w = make_weights((40,), 128)
    x = make_x(m, 128, np.float32)
    others = np.concatenate([x[:1], 100 * make_x(m - 1, 128, np.float32, seed=5)])
    first, second = (np.asarray(w4a16_matmul(rows, w))[0] for rows in (x, others))
    np.testing.assert_array_equal(first, second)


def test_nothing_decoded_outlives_a_step_of_a_loop():
    """The compiler may not hoist the decode, which depends on nothing in the loop."""
    _, w = make_weights((1024,), 1024)

    def loop(x, w):
        def body(_, x):
            y = w4a16_matmul(x, w, out_dtype=jnp.float32)
            return x + y[:, :1]

        return jax.lax.fori_loop(0, 3, body, x)

    x = jnp.ones((1, 1024), jnp.float32)
    memory = jax.jit(loop).lower(x, w).compile().memory_analysis()
    assert memory.temp_size_in_bytes < w.n * w.k  # a decoded copy has 2 or 4 bytes a weight


def test_vmap():
    weights, w = make_weights((8,), 32)
    x = make_x(4, 32, np.float32)
    by_row = jax.vmap(lambda row: w4a16_matmul(row, w))(x)
    np.testing.assert_allclose(by_row, w4a16_matmul(x, w), rtol=1e-6)
    assert error(by_row, matmul(x, weights)) < 1e-6


def test_explain_names_the_choice_and_why():
    _, w = make_weights((8,), 32)
    found = explain(jax.ShapeDtypeStruct((4, 32), jnp.float32), w)
    assert found.choice == "xla"
    text = str(found)
    assert "w4a16_matmul: xla" in text and "M=4 N=8 K=32" in text
    assert any(name == "triton" and "cannot" in verdict for name, verdict in found.candidates)


def test_a_forced_implementation_never_falls_back():
    _, w = make_weights((8,), 32)
    x = make_x(4, 32, np.float32)
    with pytest.raises(UnsupportedError, match="no implementation 'cutlass'"):
        w4a16_matmul(x, w, implementation="cutlass")
    if jax.default_backend() == "cpu":
        with pytest.raises(UnsupportedError, match="triton"):
            w4a16_matmul(jnp.asarray(x, jnp.bfloat16), w, implementation="triton")


def test_what_does_not_fit_is_named():
    _, w = make_weights((8,), 32)
    _, stack = make_weights((8,), 32, stack=(2,))
    x = jnp.ones((4, 32))
    for call, message in (
        (lambda: w4a16_matmul(x[:, :16], w), "K = 32"),
        (lambda: w4a16_matmul(x.astype(jnp.int32), w), "int32"),
        (lambda: w4a16_matmul(x, w, out_dtype=jnp.int8), "out_dtype is int8"),
        (lambda: w4a16_matmul(x, w, bias=jnp.ones(7)), "bias"),
        (lambda: w4a16_matmul(x, stack), "w4a16_grouped_matmul"),
        (lambda: w4a16_matmul(x, jnp.ones((8, 32))), "MarlinWeight"),
    ):
        with pytest.raises(FormatError, match=message):
            call()
