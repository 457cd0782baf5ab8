"""FP8 weights as nodes of a tree: what they hold, how they are told apart, where they lie."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from fp4jax.checkpoints.sharding import place
from fp4jax.errors import FormatError
from fp4jax.fp8 import (
    E4M3,
    dequantize_fp8,
    make_fp8,
    row_scales,
    take_fp8_rows,
    validate_fp8,
)
from fp4jax.layers import weights
from fp4jax.marlin import random_weight
from fp4jax.model import engine_id
from fp4jax.quantized import is_quantized


def make_arrays(*shape: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(shape) * 50).astype(E4M3)
    return values, rng.uniform(0.01, 0.1, shape[:-1]).astype(np.float32)


def make(*shape: int, seed: int = 0):
    values, scale = make_arrays(*shape, seed=seed)
    return make_fp8(jnp.asarray(values), jnp.asarray(scale))


def test_what_a_node_says_of_itself():
    w = make(3, 8, 16)
    assert (w.shape, w.stack, w.n, w.k) == ((3, 8, 16), (3,), 8, 16)
    assert w.nbytes == 3 * 8 * 16 + 3 * 8 * 4 + 3 * 16
    assert is_quantized(w) and is_quantized(random_weight(jax.random.key(0), (8,), 16))
    assert not is_quantized(w.values) and not is_quantized({"weight": w})
    with pytest.raises(dataclasses.FrozenInstanceError):
        w.scale = w.scale


def test_values_are_the_stored_ones_times_the_scale():
    values, scale = make_arrays(8, 16)
    w = make_fp8(jnp.asarray(values), jnp.asarray(scale))
    wanted = values.astype(np.float32) * scale[:, None]
    np.testing.assert_array_equal(dequantize_fp8(w), wanted)
    ids = jnp.asarray([[7, 0], [-3, 99]])
    rows = take_fp8_rows(w, ids, jnp.bfloat16)
    np.testing.assert_array_equal(rows, wanted.astype(ml_dtypes.bfloat16)[[[7, 0], [0, 7]]])
    np.testing.assert_array_equal(weights.embed(w, ids, jnp.dtype(jnp.bfloat16)), rows)


def test_scales_of_a_matrix_of_a_row_and_of_fused_shards():
    found = row_scales(
        [np.asarray(2, np.float32), np.asarray([[3], [4]], ml_dtypes.bfloat16), np.ones(1)],
        [3, 2, 1],
    )
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [2, 2, 2, 3, 4, 1])


def test_the_fingerprint_follows_the_content():
    values, scale = make_arrays(4, 16)
    first = make_fp8(jnp.asarray(values), jnp.asarray(scale))
    assert engine_id({"w": first}) == engine_id({"w": make(4, 16)})
    other = values.copy()
    other.view(np.uint8)[3, 15] ^= 1
    scaled = scale * np.asarray([1, 1, 1, 1.0000001], np.float32)
    for changed in ((other, scale), (values, scaled), (values[::-1].copy(), scale)):
        second = make_fp8(*map(jnp.asarray, changed))
        assert engine_id({"w": first}) != engine_id({"w": second})


def test_a_stack_maps_like_its_matrices():
    w = make(3, 8, 16)
    x = jnp.cos(jnp.arange(2 * 16, dtype=jnp.float32)).reshape(2, 16)
    found = jax.vmap(lambda one: weights.matmul(x, one))(w)
    for e in range(3):
        one = jax.tree.map(lambda leaf, e=e: leaf[e], w)
        assert engine_id(one) == engine_id(make_fp8(w.values[e], w.scale[e]))
        np.testing.assert_allclose(found[e], weights.matmul(x, one), rtol=1e-5, atol=1e-4)


def test_a_citizen_of_jit_with_donation():
    w = make(8, 16)
    before = dequantize_fp8(w)
    moved = jax.jit(lambda tree: tree, donate_argnums=0)(jax.device_put(w))
    np.testing.assert_array_equal(dequantize_fp8(moved), before)
    assert jax.tree.structure(moved) == jax.tree.structure(make(8, 16, seed=1))


def test_on_a_mesh():
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("model",))
    w = make(8, 16)
    along_n = place(w, ("layers_0", "qkv_proj", "weight"), mesh)
    assert along_n.values.sharding.spec == PartitionSpec("model", None)
    assert along_n.scale.sharding.spec == PartitionSpec("model")
    along_k = place(w, ("layers_0", "o_proj", "weight"), mesh)
    assert along_k.values.sharding.spec == PartitionSpec(None, "model")
    assert along_k.scale.sharding.spec == PartitionSpec(None)
    whole = place(make(6, 18), ("layers_0", "o_proj", "weight"), mesh)
    assert whole.values.sharding.spec == PartitionSpec(None, None)
    x = jnp.ones((2, 16))
    for placed in (along_n, along_k):
        assert engine_id(placed) == engine_id(w)
        found = jax.jit(weights.matmul)(x, placed)
        np.testing.assert_allclose(found, weights.matmul(x, w), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "scale", "words"),
    [
        (np.ones((4, 16), np.float32), np.ones(4, np.float32), "float8_e4m3fn"),
        (np.ones((4, 16), E4M3), np.ones(4, np.float16), "float16"),
        (np.ones((4, 16), E4M3), np.ones(5, np.float32), "do not fit"),
        (np.ones((4, 16), E4M3), np.ones((), np.float32), "do not fit"),
    ],
)
def test_arrays_that_do_not_fit(values, scale, words):
    with pytest.raises(FormatError, match=words):
        make_fp8(jnp.asarray(values), jnp.asarray(scale))


def test_contents_that_are_no_weight():
    values, scale = make_arrays(4, 16)
    validate_fp8(values, scale, "w")
    for bad in (0.0, -1.0, np.nan, np.inf):
        wrong = scale.copy()
        wrong[2] = bad
        with pytest.raises(FormatError, match=r"w: FP8 scale \[2\]"):
            validate_fp8(None, wrong, "w")
        with pytest.raises(FormatError, match="w: FP8 scale"):
            validate_fp8(None, np.asarray(bad, np.float32), "w")
    values.view(np.uint8)[3, 1] = 0xFF
    with pytest.raises(FormatError, match=r"value \[3, 1\] is NaN"):
        validate_fp8(values, scale, "w")
