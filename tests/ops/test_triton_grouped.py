"""The Triton form of the grouped W4A16 matmul in JAX's interpreter against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from op_reference import error, grouped_matmul, make_weights, make_x

from fp4jax.ops.w4a16_grouped_matmul.api import CANDIDATES
from fp4jax.ops.w4a16_grouped_matmul.triton import (
    grouped_matmul_triton,
    grouped_tile_config,
    most_tiles,
)
from fp4jax.ops.w4a16_grouped_matmul.triton_kernel import find_tile
from fp4jax.ops.w4a16_matmul.triton import TileConfig

BF16 = ml_dtypes.bfloat16
SMALL = TileConfig(block_m=16, block_n=64, tiles=1, split_k=2, warps=4, stages=2)
EXPERTS = 5


@functools.partial(jax.jit, static_argnames=("config",))
def interpreted(x, w, sizes, *, config=SMALL):
    return grouped_matmul_triton(x, w, sizes, out_dtype=jnp.float32, config=config, interpret=True)


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_matches_float64(dtype):
    weights, w = make_weights((70, 31), 80, stack=(EXPERTS,), divisor=dtype is not BF16)
    x = make_x(40, 80, dtype)
    for sizes in ((3, 0, 20, 1, 4), (0, 0, 0, 0, 0), (0, 0, 40, 0, 0), (17, 16, 1, 0, 6)):
        y = interpreted(x, w, np.asarray(sizes, np.int32))
        assert error(y, grouped_matmul(x, weights, sizes)) < 1e-6
        assert not np.asarray(y)[sum(sizes) :].any()


def test_the_chosen_configuration_and_one_expert():
    weights, w = make_weights((301,), 1856, stack=(1,))
    x = make_x(3, 1856, BF16)
    for sizes in ((3,), (2,)):
        y = interpreted(x, w, np.asarray(sizes, np.int32), config=None)
        assert error(y, grouped_matmul(x, weights, sizes)) < 1e-6


def test_a_row_does_not_depend_on_other_groups():
    _, w = make_weights((40,), 64, stack=(EXPERTS,))
    x = make_x(20, 64, BF16)
    sizes = np.array([3, 2, 5, 0, 4], np.int32)
    others = np.full_like(x, np.nan)
    others[3:5] = x[3:5]
    first, second = (np.asarray(interpreted(rows, w, sizes))[3:5] for rows in (x, others))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("padded", [6, 8])
def test_tiles_cover_every_row_once_and_are_never_too_few(padded):
    t, e, block = 37, 6, 4
    count = most_tiles(t, e, block)
    find = jax.jit(jax.vmap(lambda i, sizes: find_tile(i, sizes, t, e, block), in_axes=(0, None)))
    rng = np.random.default_rng(0)
    cases = [np.bincount(rng.integers(0, e, total), minlength=e) for total in (0, 1, 20, 36, 37)]
    cases += [np.eye(e, dtype=int)[i] * total for i in (0, 3, 5) for total in (1, 4, 37)]
    cases += [np.ones(e, int), np.array([1, 1, 1, 1, 1, 31]), np.array([31, 1, 1, 1, 1, 1])]
    for sizes in cases:
        given = np.zeros(padded, np.int32)
        given[:e] = sizes
        owner, first, end = (np.asarray(a) for a in find(np.arange(count, dtype=np.int32), given))
        wanted = np.repeat(np.arange(e + 1), [*sizes, t - sizes.sum()])
        found = np.full(t, -1)
        for a, b, c in zip(owner, first, end, strict=True):
            rows = np.arange(b, min(b + block, c, t))
            assert (found[rows] == -1).all()
            found[rows] = min(a, e)
        np.testing.assert_array_equal(found, wanted)


def test_choices():
    c = grouped_tile_config(8, 128, 1536, 2048, jnp.bfloat16)
    assert c.block_m == 16
    assert grouped_tile_config(128 * 256, 128, 1536, 2048, jnp.bfloat16).block_m > 16
    assert CANDIDATES[0].name == "triton"
