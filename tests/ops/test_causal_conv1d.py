"""The causal convolution against numpy's, in one go and in pieces of any length."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4jax.ops.causal_conv1d import causal_conv1d

BATCH, TIME, CHANNELS, WIDTH = 3, 12, 5, 4
rng = np.random.default_rng(0)
X = rng.standard_normal((BATCH, TIME, CHANNELS)).astype(np.float32)
WEIGHT = rng.standard_normal((CHANNELS, WIDTH)).astype(np.float32)
BIAS = rng.standard_normal(CHANNELS).astype(np.float32)
STATE = rng.standard_normal((BATCH, CHANNELS, WIDTH - 1)).astype(np.float32)


def reference(x, weight, bias=None, state=None, silu=False) -> np.ndarray:
    """[time, channels] in float64, a channel at a time."""
    out = np.zeros(x.shape)
    for c in range(x.shape[1]):
        past = np.zeros(weight.shape[1] - 1) if state is None else state[c]
        line = np.concatenate([past, x[:, c]]).astype(np.float64)
        out[:, c] = np.correlate(line, weight[c].astype(np.float64))
    out += 0 if bias is None else bias
    return out / (1 + np.exp(-out)) if silu else out


def conv(x, state, lengths, activation=None):
    found = compiled_conv(x, state, lengths, activation)
    return jax.tree.map(np.asarray, found)  # slicing jax arrays would compile a program a length


@functools.partial(jax.jit, static_argnames="activation")
def compiled_conv(x, state, lengths, activation):
    return causal_conv1d(x, WEIGHT, bias=BIAS, state=state, lengths=lengths, activation=activation)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("stateful", [False, True])
def test_against_numpy(activation, width, stateful):
    weight, bias = WEIGHT[:, :width], BIAS if width > 1 else None
    state = STATE[:, :, : width - 1] if stateful else None
    y, after = causal_conv1d(X, weight, bias=bias, state=state, activation=activation)
    assert after.shape == (BATCH, CHANNELS, width - 1)
    for b in range(BATCH):
        before = None if state is None else state[b]
        expected = reference(X[b], weight, bias, before, activation == "silu")
        np.testing.assert_allclose(y[b], expected, atol=2e-6)
    np.testing.assert_array_equal(after, X[:, TIME - width + 1 :].swapaxes(1, 2))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, TIME), min_size=BATCH, max_size=BATCH))
def test_rows_split_anywhere_give_what_they_give_in_one_go(split):
    """Row b is cut after ``split[b]`` tokens; padding is NaN."""
    whole, end = conv(X, STATE, jnp.full(BATCH, TIME))
    first, second = np.full_like(X, np.nan), np.full_like(X, np.nan)
    for b, cut in enumerate(split):
        first[b, :cut], second[b, : TIME - cut] = X[b, :cut], X[b, cut:]
    y1, state = conv(first, STATE, jnp.asarray(split))
    y2, state = conv(second, state, TIME - jnp.asarray(split))
    for b, cut in enumerate(split):
        joined = np.concatenate([y1[b, :cut], y2[b, : TIME - cut]])
        np.testing.assert_allclose(joined, whole[b], atol=1e-6)
    np.testing.assert_array_equal(state, end)


@settings(deadline=None, max_examples=10)
@given(st.permutations(range(BATCH)))
def test_rows_do_not_know_each_other(order):
    lengths = jnp.asarray([TIME, 7, 0])
    y, state = conv(X, STATE, lengths)
    order = np.asarray(order)
    again, moved = conv(X[order], STATE[order], lengths[order])
    np.testing.assert_array_equal(again, y[order])
    np.testing.assert_array_equal(moved, state[order])


def test_token_by_token_with_rows_that_pause():
    whole, _ = conv(X, STATE, jnp.full(BATCH, TIME), "silu")
    state, at, found = STATE, np.zeros(BATCH, int), np.zeros_like(X)
    for turn in range(2 * TIME):
        active = np.asarray([True, turn % 2 == 0, turn >= TIME]) & (at < TIME)
        tokens = X[np.arange(BATCH), np.minimum(at, TIME - 1)][:, None]
        before = state
        y, state = conv(tokens, state, jnp.asarray(active, jnp.int32), "silu")
        np.testing.assert_array_equal(state[~active], before[~active])
        found[np.flatnonzero(active), at[active]] = y[active, 0]
        at += active
    np.testing.assert_allclose(found, whole, atol=1e-6)


def test_dtypes():
    x, state = jnp.asarray(X, jnp.bfloat16), jnp.asarray(STATE)
    y, after = causal_conv1d(x, jnp.asarray(WEIGHT, jnp.bfloat16), state=state)
    assert (y.dtype, after.dtype) == (jnp.bfloat16, jnp.float32)
    assert causal_conv1d(x, jnp.asarray(WEIGHT))[1].dtype == jnp.bfloat16
    expected = reference(np.asarray(x[0], np.float32), np.asarray(WEIGHT), None, STATE[0])
    assert np.abs(np.asarray(y[0], np.float32) - expected).max() < 0.02 * np.abs(expected).max()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="'tanh' is not known"):
        causal_conv1d(X, WEIGHT, activation="tanh")
    with pytest.raises(ValueError, match=r"call for \(3, 5, 3\)"):
        causal_conv1d(X, WEIGHT, state=STATE[:, :, 1:])
