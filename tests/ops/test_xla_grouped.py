"""The XLA form of the grouped W4A16 matmul, and of the dense one, against float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from op_reference import error, grouped_matmul, make_weights, make_x

from fp4jax.errors import FormatError
from fp4jax.layers import weights as layer_weights
from fp4jax.ops.dense_matmul import dense_matmul
from fp4jax.ops.dense_matmul.xla import SPLIT_ROWS, split_f32
from fp4jax.ops.w4a16_grouped_matmul import explain_grouped, w4a16_grouped_matmul
from fp4jax.ops.w4a16_grouped_matmul.xla import FUSED_PAIRS

BF16 = ml_dtypes.bfloat16

CASES = (
    # group sizes; rows; shards; K
    ((1, 0, 2, 0), 3, (24,), 48),  # the loop over rows, empty groups
    ((0, 3, 0, 2), 8, (16, 16), 64),  # rows past the last group
    ((5, 0, 130, 0, 9), 144, (40,), 80),  # the loop over experts, several blocks in one
    ((0, 0, 0, FUSED_PAIRS + 1, 0), FUSED_PAIRS + 9, (8, 8), 16),
    ((0, 0), FUSED_PAIRS + 1, (8,), 16),  # nobody routed anywhere
)


@pytest.mark.parametrize(("sizes", "rows", "shards", "k"), CASES)
@pytest.mark.parametrize("divisor", [False, True])
def test_matches_float64(sizes, rows, shards, k, divisor):
    weights, w = make_weights(shards, k, stack=(len(sizes),), divisor=divisor)
    group_sizes = jnp.asarray(sizes, jnp.int32)
    for dtype, out_dtype, bound in (
        (np.float32, None, 1e-6),
        (BF16, np.float32, 1e-6),
        (np.float16, np.float32, 1e-6),
        (BF16, None, 2.5e-3),
    ):
        x = make_x(rows, k, dtype)
        y = w4a16_grouped_matmul(jnp.asarray(x), w, group_sizes, out_dtype=out_dtype)
        assert y.dtype == (out_dtype or dtype)
        wanted = grouped_matmul(x, weights, sizes)
        assert error(y, wanted) < bound, (dtype, out_dtype)
        np.testing.assert_array_equal(np.asarray(y)[sum(sizes) :], 0)


@pytest.mark.parametrize(("sizes", "rows", "shards", "k"), CASES)
def test_unquantized_experts_match_float64(sizes, rows, shards, k):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((len(sizes), sum(shards), k)).astype(np.float32)
    x = make_x(rows, k, np.float32)
    y = layer_weights.grouped_matmul(jnp.asarray(x), jnp.asarray(w), jnp.asarray(sizes, jnp.int32))
    wanted, row = np.zeros((rows, sum(shards))), 0
    for expert, size in enumerate(sizes):
        for _ in range(size):
            wanted[row] = w[expert].astype(np.float64) @ x[row].astype(np.float64)
            row += 1
    assert error(y, wanted) < 1e-6


def test_an_experts_neighbours_do_not_matter():
    """Poisoned matrices of experts without rows change nothing, in either form."""
    weights, w = make_weights((16,), 32, stack=(3,))
    for sizes, rows in (([2, 0, 1], 3), ([70, 0, 3], 73)):
        x = make_x(rows, 32, np.float32)
        poisoned = dataclasses.replace(w, global_scale=w.global_scale.at[1].set(jnp.nan))
        y = w4a16_grouped_matmul(x, poisoned, jnp.asarray(sizes, jnp.int32))
        assert error(y, grouped_matmul(x, weights, sizes)) < 1e-6


def test_what_does_not_fit_is_named():
    _, w = make_weights((8,), 32, stack=(3,))
    _, plain = make_weights((8,), 32)
    x, sizes = jnp.ones((4, 32)), jnp.ones(3, jnp.int32)
    for call, message in (
        (lambda: w4a16_grouped_matmul(x, plain, sizes), "stack"),
        (lambda: w4a16_grouped_matmul(x, w, sizes[:2]), "group_sizes"),
        (lambda: w4a16_grouped_matmul(x, w, sizes.astype(jnp.float32)), "int32"),
        (lambda: w4a16_grouped_matmul(x[None], w, sizes), "sorted by expert"),
        (lambda: w4a16_grouped_matmul(x[:, :16], w, sizes), "K = 32"),
    ):
        with pytest.raises(FormatError, match=message):
            call()
    assert "experts=3" in str(explain_grouped(jax.ShapeDtypeStruct((4, 32), jnp.bfloat16), w))


@pytest.mark.parametrize("m", [1, 3, SPLIT_ROWS, SPLIT_ROWS + 1])
@pytest.mark.parametrize("weight_dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("x_dtype", [np.float32, BF16])
def test_dense_matmul_matches_float64(m, weight_dtype, x_dtype):
    x = make_x(m, 96, x_dtype)
    w = make_x(40, 96, weight_dtype, seed=2)
    if x_dtype == BF16:
        w = w.astype(BF16)  # a wider weight is brought to x's dtype
    bias = np.linspace(-1, 1, 40, dtype=np.float32)
    y = dense_matmul(jnp.asarray(x), jnp.asarray(w), bias=jnp.asarray(bias), out_dtype=jnp.float32)
    wanted = x.astype(np.float64) @ w.astype(np.float64).T + bias
    assert error(y, wanted) < 2e-6


def test_three_bf16_parts_sum_to_an_f32_exactly():
    x = make_x(50, 50, np.float32) * np.float32(1e3)
    parts = [np.asarray(part, np.float64) for part in jax.jit(split_f32)(jnp.asarray(x))]
    np.testing.assert_array_equal(sum(parts), x.astype(np.float64))


def test_a_loop_keeps_no_wide_copy_of_an_unquantized_head():
    w = jnp.ones((4096, 256), jnp.bfloat16)

    def loop(x, w):
        def body(_, x):
            return x + dense_matmul(x, w)[:, :1]

        return jax.lax.fori_loop(0, 3, body, x)

    x = jnp.ones((1, 256), jnp.float32)
    memory = jax.jit(loop).lower(x, w).compile().memory_analysis()
    assert memory.temp_size_in_bytes < w.nbytes


def test_a_loop_keeps_no_wide_copy_of_an_unquantized_embedding():
    table = jnp.ones((4096, 256), jnp.bfloat16)

    def loop(table, ids):
        def body(_, ids):
            rows = layer_weights.embed(table, ids, jnp.float32)
            return ids + (jnp.sum(rows) > 0).astype(jnp.int32)

        return jax.lax.fori_loop(0, 3, body, ids)

    ids = jnp.zeros(1, jnp.int32)
    memory = jax.jit(loop).lower(table, ids).compile().memory_analysis()
    assert memory.temp_size_in_bytes < table.nbytes


@pytest.mark.parametrize("rows", [6, FUSED_PAIRS + 8])
def test_a_shard_map_splits_the_features(rows):
    """Each device has some output features of every expert; none needs another's."""
    weights, w = make_weights((64,), 32, stack=(3,))
    x = jnp.asarray(make_x(rows, 32, np.float32))
    sizes = (2, 0, rows - 3)
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("model",))

    def shard(x, words, scales, sizes):
        mine = dataclasses.replace(w, words=words, scales=scales, shards=(16,))
        return w4a16_grouped_matmul(x, mine, sizes)

    features = PartitionSpec(None, "model")
    call = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(PartitionSpec(), features, features, PartitionSpec()),
        out_specs=features,
    )
    y = jax.jit(call)(x, w.words, w.scales, jnp.asarray(sizes, jnp.int32))
    assert error(y, grouped_matmul(x, weights, sizes)) < 1e-6
