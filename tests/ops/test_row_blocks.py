"""Matmuls that work on a block of rows at a time: the same numbers, and no more memory."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compilations import Compilations
from jax.sharding import Mesh, PartitionSpec
from op_reference import error, make_weights, make_x, matmul

from fp4jax.fp8 import E4M3, FP8Weight, make_fp8
from fp4jax.layers.weights import grouped_matmul
from fp4jax.layers.weights import matmul as matmul_with
from fp4jax.loading import read_config
from fp4jax.model import forward
from fp4jax.ops.dense_matmul import dense_matmul
from fp4jax.ops.row_blocks import BLOCK_ELEMENTS, WHOLE_ELEMENTS, block_rows, by_row_blocks
from fp4jax.ops.w4a16_matmul import w4a16_matmul
from fp4jax.ops.w8a16_matmul import w8a16_matmul

BF16 = ml_dtypes.bfloat16
N, K = 301, 16384
M = 70
"""Rows that no formulation for few rows takes."""


@pytest.mark.parametrize(("rows", "k"), [(1, WHOLE_ELEMENTS), (8, 16), (N, K), (2, 1 << 22)])
def test_sizes_of_blocks(rows, k):
    block = block_rows(rows, k)
    assert 1 <= block <= rows
    assert block == rows or block == 1 or block * k <= BLOCK_ELEMENTS
    assert (block == rows) == (rows * k <= WHOLE_ELEMENTS)


def test_the_sizes_below_make_blocks_that_overlap():
    block = block_rows(N, K)
    assert -(-N // block) > 2 and N % block


@functools.cache
def nvfp4():
    return make_weights((300, 1), K)


def test_nvfp4():
    weights, w = nvfp4()
    for dtype in (np.float32, BF16, np.float16):
        x = make_x(M, K, dtype)
        y = w4a16_matmul(jnp.asarray(x), w, out_dtype=jnp.float32, implementation="xla")
        assert error(y, matmul(x, weights)) < 1e-6


@pytest.mark.parametrize("m", [1, M])
def test_fp8(m):
    values = make_x(N, K, np.float32, seed=2).astype(E4M3)
    w = make_fp8(jnp.asarray(values), jnp.ones(N, jnp.float32))
    for dtype in (np.float32, BF16, np.float16):
        x = make_x(m, K, dtype)
        y = w8a16_matmul(jnp.asarray(x), w, out_dtype=jnp.float32)
        assert error(y, x.astype(np.float64) @ values.astype(np.float64).T) < 1e-6


@pytest.mark.parametrize("m", [1, M])
@pytest.mark.parametrize("narrow", [BF16, np.float16])
def test_dense(m, narrow):
    w = make_x(N, K, narrow, seed=2)
    for dtype in (np.float32, narrow):
        x = make_x(m, K, dtype)
        y = dense_matmul(jnp.asarray(x), jnp.asarray(w), out_dtype=jnp.float32)
        assert error(y, x.astype(np.float64) @ w.astype(np.float64).T) < 1e-6


def test_a_row_does_not_depend_on_its_neighbours():
    _, w = nvfp4()
    x = make_x(M, K, np.float32)
    others = np.concatenate([x[:1], 100 * make_x(M - 1, K, np.float32, seed=5)])
    first, second = (np.asarray(w4a16_matmul(rows, w))[0] for rows in (x, others))
    np.testing.assert_array_equal(first, second)


def product(x, rows):
    return jnp.dot(x, rows.T, precision=jax.lax.Precision.HIGHEST)


def test_nan_stays_in_its_row():
    x = make_x(M, 1024, np.float32)
    x[3, 0] = np.nan
    y = np.asarray(by_row_blocks(product, jnp.asarray(x), jnp.ones((40, 1024))))
    assert np.isnan(y[3]).all() and np.isfinite(np.delete(y, 3, axis=0)).all()


def test_vmap_and_shard_map():
    w = jnp.asarray(make_x(40, 1024, np.float32, seed=2))
    x = jnp.asarray(make_x(2 * M, 1024, np.float32))
    assert block_rows(*w.shape) < 40
    wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    stacked = jax.vmap(lambda rows: by_row_blocks(product, rows, w))(x.reshape(2, M, 1024))
    assert error(stacked.reshape(2 * M, 40), wanted) < 1e-6
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    split, everywhere = PartitionSpec("data"), PartitionSpec()
    for specs, out, whole in (
        ((split, everywhere), split, wanted),
        ((everywhere, split), PartitionSpec(None, "data"), wanted),
    ):
        call = functools.partial(by_row_blocks, product)
        spread = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out)
        assert error(jax.jit(spread)(x, w), whole) < 1e-6


def temp_bytes(call, *args) -> int:
    return jax.jit(call).lower(*args).compile().memory_analysis().temp_size_in_bytes


def shape(*sizes, dtype):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("m", [1, M])
def test_no_matrix_is_held_in_another_dtype(dtype, m):
    """Widened or narrowed, it would take ``n * k`` times 2 or 4 bytes."""
    n, k = 8192, 2048
    x = shape(m, k, dtype=dtype)
    fp8 = FP8Weight(shape(n, k, dtype=E4M3), shape(n, dtype="float32"), shape(4, dtype="uint32"))
    assert temp_bytes(w8a16_matmul, x, fp8) < n * k
    for stored in ("bfloat16", "float16", "float32"):
        assert temp_bytes(dense_matmul, x, shape(n, k, dtype=stored)) < n * k, stored


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_experts_are_widened_one_by_one(stored):
    e, n, k = 64, 256, 512
    stack = shape(e, n, k, dtype=stored)
    for dtype in ("float32", "bfloat16"):
        found = temp_bytes(grouped_matmul, shape(M, k, dtype=dtype), stack, shape(e, dtype="int32"))
        assert found < e * n * k


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-modelopt", "qwen3moe-modelopt"])
def test_a_prefill_holds_no_more_with_more_layers(oracles, tmp_path, name, dtype):
    """One block of one matrix at a time; the compiler would decode all of them first."""
    stated = json.loads((oracles / name / "config.json").read_text())
    hidden = 512

    def temp(layers: int) -> int:
        sizes = {"hidden_size": hidden, "intermediate_size": 1024, "num_hidden_layers": layers}
        path = tmp_path / f"{layers}.json"
        path.write_text(json.dumps({**stated, **sizes, "moe_intermediate_size": 256}))
        read = read_config(path)
        module = read.architecture.model(config=read.config, dtype=jnp.dtype(dtype))
        tokens = shape(1, M, dtype="int32")
        params = jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]
        compiled = forward.lower(module, params, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    grown = (temp(3) - temp(1)) / 2
    activations = M * hidden * 4
    assert grown < activations, grown


@pytest.mark.parametrize("stored", ["fp8", "bfloat16"])
@pytest.mark.parametrize("stack", [(), (6,)])
def test_called_alone_it_is_compiled_once_a_shape(stored, stack):
    """Another weight, such as a second engine's, finds the compiled loop of the first."""
    n, k = 64, 512
    assert block_rows(n, k) < n
    x = jnp.asarray(make_x(6, k, np.float32))

    def weight(seed):
        values = make_x(n, k, np.float32, seed=seed)
        values = np.broadcast_to(values, (*stack, n, k))
        if stored == "fp8":
            return make_fp8(jnp.asarray(values.astype(E4M3)), jnp.ones((*stack, n), jnp.float32))
        return jnp.asarray(values.astype(stored))

    def product_with(w):
        # f16 takes the loop, whatever the weight.
        rows = x.astype(jnp.float16)
        if stack:
            return np.asarray(grouped_matmul(rows, w, jnp.ones(6, jnp.int32)))
        return np.asarray(matmul_with(rows, w))

    first, second = weight(1), weight(2)
    product_with(first)
    with Compilations() as compiled:
        product_with(second)
    assert compiled.count == 0
