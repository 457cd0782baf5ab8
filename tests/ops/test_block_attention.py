"""Attention of a block to its context and to itself, against a loop over queries in numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.ops.block_attention import block_attention

BATCH, TIME, SLOTS, HEADS, KV_HEADS, DIM = 3, 5, 11, 4, 2, 8
LENGTHS = (0, 4, 11)
SIZES = {
    "query": (BATCH, TIME, HEADS, DIM),
    "keys": (BATCH, TIME, KV_HEADS, DIM),
    "values": (BATCH, TIME, KV_HEADS, DIM),
    "context_keys": (BATCH, SLOTS, KV_HEADS, DIM),
    "context_values": (BATCH, SLOTS, KV_HEADS, DIM),
}


def operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SIZES.items()}


def reference(causal: bool, window: int | None, scale: float) -> np.ndarray:
    """A query at a time, in float64, over the keys that it sees in order of their positions."""
    x = {name: value.astype(np.float64) for name, value in operands().items()}
    out = np.zeros(SIZES["query"])
    for b, t, h in np.ndindex(BATCH, TIME, HEADS):
        length, head = LENGTHS[b], h // (HEADS // KV_HEADS)
        keys = np.concatenate([x["context_keys"][b, :length, head], x["keys"][b, :, head]])
        values = np.concatenate([x["context_values"][b, :length, head], x["values"][b, :, head]])
        own = length + t
        last = own if causal else length + TIME - 1
        seen = [at for at in range(last + 1) if window is None or own - window < at < own + window]
        scores = scale * keys[seen] @ x["query"][b, t, h]
        shares = np.exp(scores - scores.max())
        out[b, t, h] = shares @ values[seen] / shares.sum()
    return out


@functools.partial(jax.jit, static_argnames=("causal", "window", "scale"))
def compiled(x, lengths, causal, window, scale):
    return block_attention(**x, lengths=lengths, causal=causal, window=window, scale=scale)


def attend(x, causal, window, scale):
    return compiled(x, np.asarray(LENGTHS, np.int32), causal, window, scale)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_against_numpy(causal, window):
    found = attend(operands(), causal, window, None)
    np.testing.assert_allclose(found, reference(causal, window, DIM**-0.5), atol=2e-6)


def test_a_scale_of_its_own():
    np.testing.assert_allclose(
        attend(operands(), False, None, 0.1), reference(False, None, 0.1), atol=2e-6
    )


def test_what_lies_behind_the_context_is_never_read():
    x = operands()
    dirty = {name: x[name].copy() for name in x}
    for b, length in enumerate(LENGTHS):
        dirty["context_keys"][b, length:] = 1e4
        dirty["context_values"][b, length:] = -1e4
    found, wanted = (attend(each, False, 9, None) for each in (dirty, x))
    np.testing.assert_array_equal(found, wanted)


def test_bf16_over_a_cache_in_f32():
    x = {name: jnp.asarray(value) for name, value in operands().items()}
    x |= {name: x[name].astype(jnp.bfloat16) for name in ("query", "keys", "values")}
    found = attend(x, False, None, None)
    assert found.dtype == jnp.bfloat16
    wanted = reference(False, None, DIM**-0.5)
    error = np.linalg.norm(found.astype(np.float32) - wanted) / np.linalg.norm(wanted)
    assert error < 1e-2
