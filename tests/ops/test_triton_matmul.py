"""The Triton form of the W4A16 matmul in JAX's interpreter against float64, and its choices."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from op_reference import error, make_weights, make_x, matmul

from fp4jax.errors import UnsupportedError
from fp4jax.ops.w4a16_matmul import explain, w4a16_matmul
from fp4jax.ops.w4a16_matmul.api import CANDIDATES
from fp4jax.ops.w4a16_matmul.triton import MOST_ROWS, TileConfig, matmul_triton, tile_config

BF16 = ml_dtypes.bfloat16
SMALL = TileConfig(block_m=16, block_n=64, tiles=1, split_k=2, warps=4, stages=2)

CASES = (
    # M, shards, K, dtype, bias, divisor, config (None: the one that would be chosen)
    (1, (301,), 16, BF16, False, False, None),
    (17, (64, 130, 194), 1856, BF16, True, True, None),
    (3, (24, 40), 48, np.float16, True, False, SMALL),
    (16, (64,), 128, BF16, False, True, SMALL),
    (5, (70, 8), 208, np.float32, True, True, SMALL),
    (33, (64,), 272, np.float16, False, False, None),
    (66, (100,), 192, BF16, True, False, None),
)


@functools.partial(jax.jit, static_argnames=("config", "out_dtype"))
def interpreted(x, w, bias=None, *, config=SMALL, out_dtype=jnp.float32):
    return matmul_triton(x, w, bias=bias, out_dtype=out_dtype, config=config, interpret=True)


@pytest.mark.parametrize(("m", "shards", "k", "dtype", "with_bias", "divisor", "config"), CASES)
def test_matches_float64(m, shards, k, dtype, with_bias, divisor, config):
    weights, w = make_weights(shards, k, divisor=divisor)
    bias = np.linspace(-1, 1, w.n, dtype=np.float32) if with_bias else None
    x = make_x(m, k, dtype)
    y = interpreted(x, w, bias, config=config)
    assert error(y, matmul(x, weights, bias)) < 1e-6


def test_result_dtype_is_rounded_once():
    weights, w = make_weights((40,), 128)
    x = make_x(4, 128, BF16)
    exact = interpreted(x, w)
    for dtype, bound in ((jnp.bfloat16, 2e-3), (jnp.float16, 3e-4)):
        y = interpreted(x, w, out_dtype=dtype)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, exact.astype(dtype))
        assert error(y, matmul(x, weights)) < bound


def test_sums_may_pass_the_largest_f16():
    weights, w = make_weights((16,), 256)
    x = np.full((2, 256), 6e4, np.float16)
    y = interpreted(x, w)
    assert np.abs(np.asarray(y)).max() > 65504
    assert error(y, matmul(x, weights)) < 1e-6


def test_a_row_does_not_depend_on_its_neighbours():
    _, w = make_weights((40,), 128)
    x = make_x(18, 128, BF16)
    others = np.concatenate([x[:1], np.full_like(x[1:], np.nan)])
    first, second = (np.asarray(interpreted(rows, w))[0] for rows in (x, others))
    np.testing.assert_array_equal(first, second)


def test_chosen_configurations_are_valid_and_fill_the_gpu():
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        for m in (1, 16, 17, 32, 33, 64, 65, 500):
            for n, k in ((64, 16), (1024, 4096), (8192, 8192), (151936, 4096)):
                c = tile_config(m, n, k, dtype)
                for value in (c.block_m, c.block_n, c.tiles, c.split_k):
                    assert value & (value - 1) == 0 and value > 0
                assert c.block_m >= 16 and c.block_m >= min(m, 64) and c.block_n >= 64
                steps = -(-k // (64 * c.tiles))
                assert c.split_k == 1 or c.split_k * 2 <= steps
                assert tile_config(m, n, k, dtype) == c
    one = tile_config(1, 8192, 8192, jnp.bfloat16)
    assert 8192 // one.block_n * one.split_k >= 256


def _spec(w, m=4, **changes):
    spec = explain(jax.ShapeDtypeStruct((m, w.k), jnp.bfloat16), w).spec
    return dataclasses.replace(spec, **{"platform": "cuda", "device_kind": None, **changes})


def test_reasons_are_given_in_words():
    _, w = make_weights((24,), 32)
    triton = CANDIDATES[0]
    assert triton.name == "triton"
    assert triton.unsupported_reason(_spec(w)) is None
    assert triton.slower_reason(_spec(w)) is None
    assert "platform is cpu" in triton.unsupported_reason(_spec(w, platform="cpu"))
    assert "layout other" in triton.unsupported_reason(_spec(w, layout="other"))
    assert "8.0" in triton.unsupported_reason(_spec(w, device_kind="Tesla V100-SXM2-16GB"))
    assert triton.unsupported_reason(_spec(w, device_kind="NVIDIA H200")) is None
    assert triton.slower_reason(_spec(w, m=MOST_ROWS)) is None
    assert f"M = {MOST_ROWS + 1}" in triton.slower_reason(_spec(w, m=MOST_ROWS + 1))
    assert triton.slower_reason(_spec(w, m=MOST_ROWS + 1, x_dtype="float32")) is None


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU answers")
def test_forced_on_a_cpu_it_says_why_not():
    _, w = make_weights((24,), 32)
    x = make_x(2, 32, BF16)
    with pytest.raises(UnsupportedError, match="platform is cpu"):
        jax.block_until_ready(w4a16_matmul(x, w, implementation="triton"))
    found = explain(x, w, implementation="triton")
    assert found.choice is None and "platform is cpu" in str(found)
    assert explain(x, w).choice == "xla"


def test_under_vmap_and_shard_map():
    weights, w = make_weights((24,), 64)
    x = make_x(8, 64, BF16).reshape(4, 2, 64)
    wanted = matmul(x.reshape(8, 64), weights)
    y = jax.vmap(lambda x: interpreted(x, w))(x)
    assert error(y.reshape(8, 24), wanted) < 1e-6
    devices = 2 if len(jax.devices()) > 1 else 1
    mesh = jax.make_mesh((devices,), ("rows",), axis_types=(AxisType.Auto,))
    y = jax.jit(
        jax.shard_map(
            lambda x, w: w4a16_matmul(x, w, out_dtype=jnp.float32),
            mesh=mesh,
            in_specs=(P("rows"), P()),
            out_specs=P("rows"),
        )
    )(x, w)
    assert error(y.reshape(8, 24), wanted) < 1e-6
