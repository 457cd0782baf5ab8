"""Mamba2's recurrence against its definition in float64, whole, in chunks and token by token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4jax.ops.mamba2 import mamba2

BATCH, TIME, GROUPS, HEADS, DIM, N = 3, 40, 2, 6, 8, 12
LIMIT = (0.01, 1.5)
TOLERANCE = 1e-6
"""Of the largest value; 2e-7 is reached."""


def reference(tokens, a, d, bias, state, limit=LIMIT):
    """The definition, one token of one head at a time, in float64."""
    x, dt, b, c = (np.asarray(v, np.float64) for v in tokens)
    state = np.array(state, np.float64)
    batch, time, heads, _ = x.shape
    out = np.zeros(x.shape)
    for row in range(batch):
        for h in range(heads):
            group = h // (heads // b.shape[2])
            for t in range(time):
                step = np.clip(np.logaddexp(0, dt[row, t, h] + bias[h]), *limit)
                written = step * np.outer(x[row, t, h], b[row, t, group])
                state[row, h] = np.exp(step * a[h]) * state[row, h] + written
                out[row, t, h] = state[row, h] @ c[row, t, group] + d[h] * x[row, t, h]
    return out, state


def operands(seed=0, batch=BATCH, time=TIME, groups=GROUPS):
    """Tokens, weights with decays from mild to strong, and a state."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, time, HEADS, DIM))
    dt = rng.uniform(-5, 3, (batch, time, HEADS))
    b, c = rng.standard_normal((2, batch, time, groups, N))
    a = -np.exp(rng.uniform(-3, 3, HEADS))
    d, bias = rng.standard_normal((2, HEADS))
    state = rng.standard_normal((batch, HEADS, DIM, N))
    tokens, weights, state = jax.tree.map(np.float32, ((x, dt, b, c), (a, d, bias), state))
    return tokens, weights, state


def scan(tokens, weights, state, lengths=None, chunk=16):
    batch, time = tokens[0].shape[:2]
    lengths = np.full(batch, time) if lengths is None else np.asarray(lengths)
    found = compiled_scan(tokens, weights, state, lengths.astype(np.int32), chunk)
    return jax.tree.map(np.asarray, found)  # slicing jax arrays would compile a program a length


@functools.partial(jax.jit, static_argnames="chunk")
def compiled_scan(tokens, weights, state, lengths, chunk):
    (x, dt, b, c), (a, d, bias) = tokens, weights
    return mamba2(
        x, dt, a, b, c, d=d, dt_bias=bias, dt_limit=LIMIT, state=state, lengths=lengths, chunk=chunk
    )


def error(found, expected) -> float:
    found = np.asarray(found, np.float32)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def assert_same(found, expected):
    assert error(found[0], expected[0]) < TOLERANCE
    assert error(found[1], expected[1]) < TOLERANCE


@pytest.mark.parametrize(
    ("time", "chunk", "groups"),
    [(1, 16, 2), (2, 64, 6), (3, 1, 1), (40, 16, 2), (64, 64, 3), (50, 7, 2)],
)
def test_against_the_definition(time, chunk, groups):
    tokens, weights, state = operands(time, time=time, groups=groups)
    found = scan(tokens, weights, state, chunk=chunk)
    assert_same(found, reference(tokens, *weights, state))


def test_from_nothing_and_without_what_is_optional():
    (x, dt, b, c), (a, _, _), state = operands(7, time=3)
    found = mamba2(x, dt, a, b, c)
    zeros = np.zeros(HEADS)
    assert_same(found, reference((x, dt, b, c), a, zeros, zeros, np.zeros_like(state), (0, np.inf)))


def pieces(tokens, begin, count):
    """Tokens ``begin[b]`` to ``begin[b] + count[b]`` of each row, padded with NaN."""
    found = tuple(np.full_like(x, np.nan) for x in tokens)
    for x, part in zip(tokens, found, strict=True):
        for b, (first, n) in enumerate(zip(begin, count, strict=True)):
            part[b, :n] = x[b, first : first + n]
    return found


@pytest.fixture(scope="module")
def expected_of_seed_1():
    tokens, weights, state = operands(1)
    return reference(tokens, *weights, state)


@settings(deadline=None, max_examples=30)
@given(
    split=st.lists(st.integers(0, TIME), min_size=BATCH, max_size=BATCH),
    chunk=st.sampled_from([5, 16]),
)
def test_rows_split_anywhere_give_what_they_give_in_one_go(expected_of_seed_1, split, chunk):
    tokens, weights, state = operands(1)
    expected, end = expected_of_seed_1
    rest = [TIME - cut for cut in split]
    first, middle = scan(pieces(tokens, [0] * BATCH, split), weights, state, split, chunk)
    second, after = scan(pieces(tokens, split, rest), weights, middle, rest, chunk)
    for b, cut in enumerate(split):
        if cut == 0:
            np.testing.assert_array_equal(middle[b], state[b])
        if cut == TIME:
            np.testing.assert_array_equal(after[b], middle[b])
        joined = np.concatenate([first[b, :cut], second[b, : TIME - cut]])
        assert error(joined, expected[b]) < TOLERANCE
    assert error(after, end) < TOLERANCE


@settings(deadline=None, max_examples=6)
@given(chunk=st.integers(1, TIME + 3))
def test_any_chunk_gives_the_same(expected_of_seed_1, chunk):
    tokens, weights, state = operands(1)
    assert_same(scan(tokens, weights, state, chunk=chunk), expected_of_seed_1)


def test_token_by_token_with_rows_that_pause(expected_of_seed_1):
    tokens, weights, state = operands(1)
    expected, end = expected_of_seed_1
    at = np.zeros(BATCH, int)
    found = np.zeros_like(expected)
    for turn in range(2 * TIME):
        active = np.asarray([True, turn % 2 == 0, turn >= TIME]) & (at < TIME)
        one = pieces(tokens, np.minimum(at, TIME - 1), active.astype(int))
        one = tuple(x[:, :1] for x in one)
        before = state
        out, state = scan(one, weights, state, active)
        np.testing.assert_array_equal(state[~active], before[~active])
        found[np.flatnonzero(active), at[active]] = out[active, 0]
        at += active
    assert error(found, expected) < TOLERANCE
    assert error(state, end) < TOLERANCE


@settings(deadline=None, max_examples=10)
@given(st.permutations(range(BATCH)))
def test_rows_do_not_know_each_other(order):
    tokens, weights, state = operands(1)
    lengths, order = np.asarray([TIME, 17, 0]), np.asarray(order)
    out, after = scan(tokens, weights, state, lengths)
    again, moved = scan(tuple(x[order] for x in tokens), weights, state[order], lengths[order])
    np.testing.assert_array_equal(again, out[order])
    np.testing.assert_array_equal(moved, after[order])


@pytest.mark.parametrize("rate", [0.0, 90.0, 1e4])
def test_decays_from_none_to_complete(rate):
    tokens, (a, d, bias), state = operands(4)
    weights = np.full_like(a, -rate), d, bias
    assert_same(scan(tokens, weights, state), reference(tokens, *weights, state))


@pytest.mark.parametrize("dt", [-1e4, -30.0, 30.0])
def test_time_steps_at_their_limits(dt):
    (x, steps, b, c), weights, state = operands(8)
    tokens = x, np.full_like(steps, dt), b, c
    assert_same(scan(tokens, weights, state), reference(tokens, *weights, state))


def test_a_long_sequence_keeps_its_accuracy():
    tokens, weights, state = operands(5, batch=1, time=1000)
    found = scan(tokens, weights, state, chunk=64)
    assert_same(found, reference(tokens, *weights, state))


def test_bf16_tokens_and_an_f32_state():
    tokens, weights, state = operands(6)
    narrow = tuple(jnp.asarray(x, jnp.bfloat16) for x in tokens)
    out, after = scan(narrow, weights, state)
    assert (out.dtype, after.dtype) == (jnp.bfloat16, jnp.float32)
    expected, end = reference(tuple(np.asarray(x, np.float32) for x in narrow), *weights, state)
    assert error(out, expected) < 2**-8
    assert error(after, end) < TOLERANCE


def test_what_does_not_fit_is_refused():
    (x, dt, b, c), (a, _, _), _ = operands()
    with pytest.raises(ValueError, match="chunk=0 must be positive"):
        mamba2(x, dt, a, b, c, chunk=0)
    with pytest.raises(ValueError, match="5 heads are not a multiple of 2 groups"):
        mamba2(x[:, :, :5], dt[:, :, :5], a[:5], b, c)
    with pytest.raises(ValueError, match=r"dt_limit=\(2, 1\) must be 0 <= smallest <= largest"):
        mamba2(x, dt, a, b, c, dt_limit=(2, 1))
