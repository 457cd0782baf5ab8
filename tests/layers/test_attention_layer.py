"""Attention with grouped queries, windows, norms and a cache, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_references import attend, error, random_nvfp4, rms_norm, rotate, values

from fp4jax.layers.attention import Attention
from fp4jax.layers.cache import KVCache
from fp4jax.layers.rope import RopeConfig, inverse_frequencies
from fp4jax.marlin import repack
from fp4jax.ops.attention import attention
from fp4jax.ops.attention.xla import QUERY_CHUNK

HIDDEN, HEADS, KV_HEADS, DIM, TIME = 64, 6, 2, 16, 11
ROPE = RopeConfig(theta=500.0)


def normal(rng, *shape, scale=1.0):
    return (rng.normal(size=shape) * scale).astype(np.float32)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_the_op_with_grouped_queries_and_windows(kv_heads, window):
    rng = np.random.default_rng(0)
    query = normal(rng, 2, 5, 6, 16)
    keys, slots = normal(rng, 2, 9, kv_heads, 16), normal(rng, 2, 9, kv_heads, 16)
    positions = np.asarray([[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]], np.int32)
    found = attention(query, keys, slots, positions, window=window)
    for b in range(2):
        expected = attend(*(a[b].astype(float) for a in (query, keys, slots)), positions[b], window)
        assert error(found[b], expected) < 1e-6


def test_the_op_with_a_scale_of_its_own_and_in_bf16():
    rng = np.random.default_rng(1)
    arrays = [jnp.asarray(normal(rng, 1, 4, 2, 8)).astype(jnp.bfloat16) for _ in range(3)]
    wide = [np.asarray(a[0]).astype(float) for a in arrays]
    positions = np.arange(4, dtype=np.int32)[None]
    found = attention(*arrays, positions, scale=0.9)
    assert found.dtype == jnp.bfloat16
    assert error(found[0], attend(*wide, positions[0], scale=0.9)) < 2**-7  # weights are bf16 too


@pytest.mark.parametrize("window", [None, 37])
def test_the_op_in_chunks_of_queries(window):
    """More queries than are attended to at once, no multiple of the chunk, not from position 0."""
    rng = np.random.default_rng(2)
    time, before = QUERY_CHUNK + 77, 5
    query = normal(rng, 1, time, 2, 4)
    keys, slots = normal(rng, 1, time + before, 1, 4), normal(rng, 1, time + before, 1, 4)
    positions = before + np.arange(time, dtype=np.int32)
    found = jax.jit(attention, static_argnames="window")(
        query, keys, slots, positions[None], window=window
    )
    picked = [0, 1, QUERY_CHUNK - 1, QUERY_CHUNK, time - 1]
    wide = [a[0].astype(float) for a in (query, keys, slots)]
    expected = attend(wide[0][picked], wide[1], wide[2], positions[picked], window)
    assert error(np.asarray(found)[0, picked], expected) < 1e-6


def make_layer(rng, *, qk_norm, window, bias, quantized):
    """A layer, its tree, and a float64 function of a whole row of inputs."""
    sizes = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
    if quantized:
        members = [random_nvfp4(rng, n, HIDDEN) for n in sizes]
        out = random_nvfp4(rng, HIDDEN, HEADS * DIM)
        params = {"qkv_proj": {"weight": repack(members)}, "o_proj": {"weight": repack(out)}}
    else:
        members = [normal(rng, n, HIDDEN, scale=HIDDEN**-0.5) for n in sizes]
        out = normal(rng, HIDDEN, HEADS * DIM, scale=HIDDEN**-0.5)
        stacked = jnp.asarray(np.concatenate(members))
        params = {"qkv_proj": {"weight": stacked}, "o_proj": {"weight": jnp.asarray(out)}}
    offsets = [normal(rng, n) if bias else np.zeros(n, np.float32) for n in (*sizes, HIDDEN)]
    if bias:
        params["qkv_proj"]["bias"] = jnp.asarray(np.concatenate(offsets[:3]))
        params["o_proj"]["bias"] = jnp.asarray(offsets[3])
    norms = [1 + normal(rng, DIM, scale=0.3) for _ in range(2)]
    if qk_norm:
        params |= {
            name: {"weight": jnp.asarray(w)}
            for name, w in zip(("q_norm", "k_norm"), norms, strict=True)
        }
    frequencies = np.asarray(inverse_frequencies(ROPE, DIM), np.float64)

    def reference(x):
        parts = [
            (x @ values(m).T + offset).reshape(len(x), -1, DIM)
            for m, offset in zip(members, offsets, strict=False)
        ]
        for i in range(2):
            if qk_norm:
                parts[i] = rms_norm(parts[i], norms[i].astype(float), qk_norm)
            parts[i] = np.asarray(
                [[rotate(head, t, frequencies) for head in row] for t, row in enumerate(parts[i])]
            )
        mixed = attend(*parts, range(len(x)), window)
        return mixed.reshape(len(x), -1) @ values(out).T + offsets[3]

    layer = Attention(
        HIDDEN, HEADS, KV_HEADS, DIM, ROPE, qk_norm=qk_norm, window=window, use_bias=bias
    )
    return layer, {"params": params}, reference


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": None, "window": None, "bias": False, "quantized": True},
        {"qk_norm": None, "window": None, "bias": True, "quantized": False},
        {"qk_norm": 1e-5, "window": 3, "bias": True, "quantized": True},
    ],
    ids=["llama", "bias", "qwen3"],
)
def test_the_layer_without_and_with_a_cache(options):
    rng = np.random.default_rng(5)
    layer, variables, reference = make_layer(rng, **options)
    x = normal(rng, 2, TIME, HIDDEN)
    expected = np.stack([reference(row.astype(float)) for row in x])
    positions = np.broadcast_to(np.arange(TIME, dtype=np.int32), (2, TIME))
    step = jax.jit(layer.apply)
    found, none = step(variables, x, positions, None)
    assert none is None
    assert error(found, expected) < 2e-6

    cache = KVCache.zeros(2, TIME + 3, KV_HEADS, DIM, jnp.float32)
    pieces = []
    for begin, end in ((0, 7), (7, 8), (8, 9), (9, 10), (10, 11)):
        out, cache = step(variables, x[:, begin:end], positions[:, begin:end], cache)
        pieces.append(np.asarray(out))
    assert error(np.concatenate(pieces, axis=1), expected) < 2e-6


def test_rows_at_different_positions_and_padding():
    """Padding is overwritten by what follows, and no query sees it."""
    rng = np.random.default_rng(6)
    layer, variables, reference = make_layer(
        rng, qk_norm=None, window=None, bias=False, quantized=True
    )
    x = normal(rng, 2, TIME, HIDDEN)
    lengths = np.asarray([7, 4])
    step = jax.jit(layer.apply)
    cache = KVCache.zeros(2, TIME, KV_HEADS, DIM, jnp.float32)
    positions = np.broadcast_to(np.arange(7, dtype=np.int32), (2, 7))
    _, cache = step(variables, x[:, :7], positions, cache)
    following = np.stack([row[n : n + 3] for row, n in zip(x, lengths, strict=True)])
    positions = (lengths[:, None] + np.arange(3)).astype(np.int32)
    out, _ = step(variables, following, positions, cache)
    for b, n in enumerate(lengths):
        expected = reference(x[b, : n + 3].astype(float))[n:]
        assert error(out[b], expected) < 2e-6


def test_cache_writes():
    """Slots beside the written ones keep what they held; one row takes the path without scatter."""
    rng = np.random.default_rng(7)
    for batch in (1, 3):
        before = KVCache(
            jnp.asarray(normal(rng, batch, 8, 2, 4)),
            jnp.asarray(normal(rng, batch, 8, 2, 4)).astype(jnp.bfloat16),
        )
        keys, slots = normal(rng, batch, 3, 2, 4), normal(rng, batch, 3, 2, 4)
        position = np.asarray([2, 0, 5][:batch], np.int32)
        after = before.write(jnp.asarray(keys), jnp.asarray(slots), jnp.asarray(position))
        expected = [np.asarray(before.keys).copy(), np.asarray(before.values).copy()]
        for b, p in enumerate(position):
            expected[0][b, p : p + 3] = keys[b]
            expected[1][b, p : p + 3] = slots[b].astype(expected[1].dtype)
        np.testing.assert_array_equal(np.asarray(after.keys), expected[0])
        np.testing.assert_array_equal(np.asarray(after.values), expected[1])
