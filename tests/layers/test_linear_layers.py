"""Linear, fused and tied layers over every way of storing a matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from layer_references import error, random_nvfp4, silu, swiglu, values

from fp4jax.layers.embedding import Embedding
from fp4jax.layers.linear import FusedLinear, Linear
from fp4jax.layers.mlp import GatedMLP
from fp4jax.marlin import repack

K = 80
SHARDS, NAMES = (24, 8, 13), ("q_proj", "k_proj", "v_proj")
TOLERANCE = {jnp.float32: 1e-6, jnp.bfloat16: 2**-8, jnp.float16: 2**-10}
"""Relative to the largest value: one rounding of the result (f32: some of the sum)."""


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def dense(rng, n: int, k: int, dtype=np.float32) -> np.ndarray:
    return (rng.normal(size=(n, k)) * k**-0.5).astype(dtype)


def inputs(rng, *shape, dtype=jnp.float32):
    """An array in ``dtype`` and its exact float64 values."""
    x = jnp.asarray(rng.normal(size=shape).astype(np.float32)).astype(dtype)
    return x, np.asarray(x).astype(np.float64)


def stored(weight):
    """What the loader makes of a host matrix: the tree's node."""
    if isinstance(weight, np.ndarray):
        return jnp.asarray(weight)
    return repack(weight)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: d.__name__)
@pytest.mark.parametrize(
    ("kind", "bias"),
    [("modelopt", True), ("compressed-tensors", False), ("f32", True), ("bf16", False)],
)
def test_linear(rng, kind, bias, dtype):
    n = 37
    weight = {
        "modelopt": lambda: random_nvfp4(rng, n, K),
        "compressed-tensors": lambda: random_nvfp4(rng, n, K, divisor=True),
        # Values that every compute dtype holds exactly.
        "f32": lambda: dense(rng, n, K, ml_dtypes.float8_e4m3fn).astype(np.float32),
        "bf16": lambda: dense(rng, n, K, ml_dtypes.float8_e4m3fn).astype(ml_dtypes.bfloat16),
    }[kind]()
    params = {"weight": stored(weight)}
    x, wide = inputs(rng, 2, 3, K, dtype=dtype)
    expected = wide @ values(weight).T
    if bias:
        params["bias"] = jnp.asarray(rng.normal(size=n).astype(np.float32))
        expected += np.asarray(params["bias"], np.float64)
    layer = Linear(n)
    apply = jax.jit(layer.apply, static_argnums=2)
    found = apply({"params": params}, x, None)
    assert (found.dtype, found.shape) == (dtype, (2, 3, n))
    assert error(found, expected) < TOLERANCE[dtype]
    logits = apply({"params": params}, x, jnp.float32)
    assert logits.dtype == jnp.float32
    assert error(logits, expected) < TOLERANCE[jnp.float32]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("divisor", [False, True], ids=["multiplier", "divisor"])
def test_fused_shards_with_scales_of_their_own(rng, bias, divisor):
    shards = [random_nvfp4(rng, n, K, divisor=divisor) for n in SHARDS]
    assert len({float(shard.global_scale) for shard in shards}) == 3
    params = {"weight": repack(shards)}
    offset = np.zeros(sum(SHARDS))
    if bias:
        offset = rng.normal(size=sum(SHARDS)).astype(np.float32)
        params["bias"] = jnp.asarray(offset)
    x, wide = inputs(rng, 5, K)
    found = jax.jit(FusedLinear(SHARDS, NAMES).apply)({"params": params}, x)
    begin = 0
    for part, shard in zip(found, shards, strict=True):
        end = begin + shard.n
        assert part.shape == (5, shard.n)
        assert error(part, wide @ values(shard).T + offset[begin:end]) < 1e-6
        begin = end


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: d.__name__)
def test_fused_members_that_are_stored_apart(rng, dtype):
    members = [
        random_nvfp4(rng, SHARDS[0], K),
        random_nvfp4(rng, SHARDS[1], K, divisor=True),
        dense(rng, SHARDS[2], K, ml_dtypes.float8_e4m3fn).astype(ml_dtypes.bfloat16),
    ]
    offset = rng.normal(size=sum(SHARDS)).astype(np.float32)
    params = {f"{name}_weight": stored(m) for name, m in zip(NAMES, members, strict=True)}
    params["bias"] = jnp.asarray(offset)
    x, wide = inputs(rng, 5, K, dtype=dtype)
    found = jax.jit(FusedLinear(SHARDS, NAMES).apply)({"params": params}, x)
    offsets = np.split(offset.astype(np.float64), np.cumsum(SHARDS)[:-1])
    for part, member, shift in zip(found, members, offsets, strict=True):
        assert part.dtype == dtype
        assert error(part, wide @ values(member).T + shift) < TOLERANCE[dtype]


@pytest.mark.parametrize("quantized", [True, False])
def test_gated_mlp(rng, quantized):
    width = 48

    def make(n, k):
        return random_nvfp4(rng, n, k) if quantized else dense(rng, n, k)

    gate, up, down = make(width, K), make(width, K), make(K, width)
    fused = repack([gate, up]) if quantized else jnp.concatenate([stored(gate), stored(up)])
    params = {"gate_up_proj": {"weight": fused}, "down_proj": {"weight": stored(down)}}
    x, wide = inputs(rng, 2, 3, K)
    found = jax.jit(GatedMLP(K, width).apply)({"params": params}, x)
    assert error(found, swiglu(wide, values(gate), values(up), values(down))) < 1e-6

    b_gate, b_up, b_down = (rng.normal(size=n).astype(np.float32) for n in (width, width, K))
    params["gate_up_proj"]["bias"] = jnp.concatenate([jnp.asarray(b_gate), jnp.asarray(b_up)])
    params["down_proj"]["bias"] = jnp.asarray(b_down)
    inside = silu(wide @ values(gate).T + b_gate) * (wide @ values(up).T + b_up)
    found = jax.jit(GatedMLP(K, width).apply)({"params": params}, x)
    assert error(found, inside @ values(down).T + b_down) < 1e-6


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors", "bf16", "f32"])
def test_embedding_and_tied_head(rng, kind):
    vocab = 43
    table = {
        "modelopt": lambda: random_nvfp4(rng, vocab, K),
        "compressed-tensors": lambda: random_nvfp4(rng, vocab, K, divisor=True),
        "bf16": lambda: dense(rng, vocab, K, ml_dtypes.bfloat16),
        "f32": lambda: dense(rng, vocab, K),
    }[kind]()
    ids = jnp.asarray([[0, 42, 7], [7, 1, 30]], jnp.int32)
    variables = {"params": {"weight": stored(table)}}
    layer = Embedding(vocab, K, jnp.float32)
    found = layer.apply(variables, ids)
    expected = values(table)[np.asarray(ids)]
    assert found.shape == (2, 3, K)
    plain = isinstance(table, np.ndarray)
    assert error(found, expected) <= (0 if plain else 1e-6)  # scaled once, in f32
    narrow = Embedding(vocab, K, jnp.bfloat16).apply(variables, ids)
    assert narrow.dtype == jnp.bfloat16
    assert error(narrow, expected) < 2**-8
    outside = layer.apply(variables, jnp.asarray([-5, 99], jnp.int32))
    np.testing.assert_array_equal(
        np.asarray(outside), np.asarray(layer.apply(variables, jnp.asarray([0, 42], jnp.int32)))
    )
    x, wide = inputs(rng, 2, 3, K)
    logits = layer.apply(variables, x, method="attend")
    assert logits.dtype == jnp.float32
    assert error(logits, wide @ values(table).T) < 1e-6
    x, wide = inputs(rng, 2, 3, K, dtype=jnp.bfloat16)
    logits = layer.apply(variables, x, method="attend")
    assert logits.dtype == jnp.float32  # not rounded to the activations' dtype
    rounded = values(table).astype(ml_dtypes.bfloat16) if kind == "f32" else values(table)
    assert error(logits, wide @ rounded.astype(np.float64).T) < 1e-6
