"""The gated delta rule against its definition in float64, whole, in chunks and token by token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4jax.ops.gated_delta_rule import gated_delta_rule
from fp4jax.ops.gated_delta_rule.xla import inverse_of_unit_lower

BATCH, TIME, KEY_HEADS, HEADS, DK, DV = 3, 40, 2, 6, 8, 12
TOLERANCE = 3e-6
"""Of the largest value; 6e-7 is reached."""


def reference(query, key, value, g, beta, state, scale=None):
    """The definition, one token of one head at a time, in float64."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (query, key, value, g, beta))
    state = np.array(state, np.float64)
    batch, time, heads, dv = v.shape
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = np.zeros((batch, time, heads, dv))
    for b in range(batch):
        for h in range(heads):
            source = h // (heads // k.shape[2])
            for t in range(time):
                s = np.exp(g[b, t, h]) * state[b, h]
                error = v[b, t, h] - s.T @ k[b, t, source]
                s = s + np.outer(k[b, t, source], beta[b, t, h] * error)
                state[b, h] = s
                out[b, t, h] = scale * (s.T @ q[b, t, source])
    return out, state


def operands(seed=0, batch=BATCH, time=TIME, dtype=np.float32):
    """Unit keys and queries, decays from mild to strong, and a state."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, batch, time, KEY_HEADS, DK))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((batch, time, HEADS, DV))
    g = -np.exp(rng.uniform(-6, 2, (batch, time, HEADS)))
    beta = rng.uniform(0, 1, (batch, time, HEADS))
    state = rng.standard_normal((batch, HEADS, DK, DV)).astype(np.float32)
    return tuple(x.astype(dtype) for x in (q, k, v, g, beta)), state


def rule(tokens, state, lengths=None, chunk=16):
    batch, time = tokens[0].shape[:2]
    lengths = np.full(batch, time) if lengths is None else np.asarray(lengths)
    found = compiled_rule(tokens, state, lengths.astype(np.int32), chunk)
    return jax.tree.map(np.asarray, found)  # slicing jax arrays would compile a program a length


@functools.partial(jax.jit, static_argnames="chunk")
def compiled_rule(tokens, state, lengths, chunk):
    return gated_delta_rule(*tokens, state=state, lengths=lengths, chunk=chunk)


def error(found, expected) -> float:
    found = np.asarray(found, np.float32)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def assert_same(found, expected):
    assert error(found[0], expected[0]) < TOLERANCE
    assert error(found[1], expected[1]) < TOLERANCE


@pytest.mark.parametrize(
    ("time", "chunk"),
    [(1, 16), (2, 64), (3, 1), (40, 16), (64, 64)],
)
def test_against_the_definition(time, chunk):
    tokens, state = operands(time, time=time)
    assert_same(rule(tokens, state, chunk=chunk), reference(*tokens, state))


def test_from_nothing_and_with_a_scale_of_its_own():
    tokens, state = operands(7)
    tokens = tuple(x[:, :3] for x in tokens)
    found = gated_delta_rule(*tokens, scale=0.5)
    assert_same(found, reference(*tokens, np.zeros_like(state), scale=0.5))


def pieces(tokens, begin, count):
    """Tokens ``begin[b]`` to ``begin[b] + count[b]`` of each row, padded with NaN."""
    found = tuple(np.full_like(x, np.nan) for x in tokens)
    for x, part in zip(tokens, found, strict=True):
        for b, (first, n) in enumerate(zip(begin, count, strict=True)):
            part[b, :n] = x[b, first : first + n]
    return found


@pytest.fixture(scope="module")
def expected_of_seed_1():
    tokens, state = operands(1)
    return reference(*tokens, state)


@settings(deadline=None, max_examples=30)
@given(
    split=st.lists(st.integers(0, TIME), min_size=BATCH, max_size=BATCH),
    chunk=st.sampled_from([4, 16]),
)
def test_rows_split_anywhere_give_what_they_give_in_one_go(expected_of_seed_1, split, chunk):
    tokens, state = operands(1)
    expected, end = expected_of_seed_1
    rest = [TIME - cut for cut in split]
    first, middle = rule(pieces(tokens, [0] * BATCH, split), state, jnp.asarray(split), chunk)
    second, after = rule(pieces(tokens, split, rest), middle, jnp.asarray(rest), chunk)
    for b, cut in enumerate(split):
        if cut == 0:
            np.testing.assert_array_equal(middle[b], state[b])
        if cut == TIME:
            np.testing.assert_array_equal(after[b], middle[b])
        joined = np.concatenate([first[b, :cut], second[b, : TIME - cut]])
        assert error(joined, expected[b]) < TOLERANCE
    assert error(after, end) < TOLERANCE


def test_token_by_token_with_rows_that_pause(expected_of_seed_1):
    tokens, state = operands(1)
    expected, end = expected_of_seed_1
    at = np.zeros(BATCH, int)
    found = np.zeros_like(expected)
    for turn in range(2 * TIME):
        active = np.asarray([True, turn % 2 == 0, turn >= TIME]) & (at < TIME)
        one = pieces(tokens, np.minimum(at, TIME - 1), active.astype(int))
        one = tuple(x[:, :1] for x in one)
        before = state
        out, state = rule(one, state, jnp.asarray(active, jnp.int32))
        np.testing.assert_array_equal(state[~active], before[~active])
        found[np.flatnonzero(active), at[active]] = out[active, 0]
        at += active
    assert error(found, expected) < TOLERANCE
    assert error(state, end) < TOLERANCE


@settings(deadline=None, max_examples=10)
@given(st.permutations(range(BATCH)))
def test_rows_do_not_know_each_other(order):
    tokens, state = operands(1)
    lengths, order = jnp.asarray([TIME, 17, 0]), np.asarray(order)
    out, after = rule(tokens, state, lengths)
    again, moved = rule(tuple(x[order] for x in tokens), state[order], lengths[order])
    np.testing.assert_array_equal(again, out[order])
    np.testing.assert_array_equal(moved, after[order])


def test_equal_keys_that_overwrite_each_other():
    """Repeated text: every token rewrites the last one's value, with nothing forgotten."""
    (q, k, v, g, beta), state = operands(3, time=64)
    k[:] = k[:, :1]
    tokens = q, k, v, np.zeros_like(g), np.ones_like(beta)
    assert_same(rule(tokens, state, chunk=64), reference(*tokens, state))


@pytest.mark.parametrize("strength", [0.0, 90.0, 1e4])
def test_decays_from_none_to_complete(strength):
    (q, k, v, g, beta), state = operands(4)
    tokens = q, k, v, np.full_like(g, -strength), beta
    assert_same(rule(tokens, state), reference(*tokens, state))


def test_a_long_sequence_keeps_its_accuracy():
    tokens, state = operands(5, batch=1, time=1000)
    assert_same(rule(tokens, state, chunk=64), reference(*tokens, state))


@pytest.mark.parametrize("n", [1, 2, 16, 64])
def test_inverse_of_unit_lower(n):
    a = np.tril(np.random.default_rng(n).uniform(-1, 1, (3, 2, n, n)), -1) / max(n, 4)
    found = inverse_of_unit_lower(jnp.asarray(a, jnp.float32))
    np.testing.assert_allclose(found, np.linalg.inv(np.eye(n) + a), atol=2e-6)


def test_bf16_tokens_and_an_f32_state():
    tokens, state = operands(6)
    narrow = tuple(jnp.asarray(x, jnp.bfloat16) for x in tokens)
    out, after = rule(narrow, state)
    assert (out.dtype, after.dtype) == (jnp.bfloat16, jnp.float32)
    expected, end = reference(*(np.asarray(x, np.float32) for x in narrow), state)
    assert error(out, expected) < 2**-8
    assert error(after, end) < TOLERANCE


def test_what_does_not_fit_is_refused():
    tokens, _ = operands()
    with pytest.raises(ValueError, match="chunk=24 must be a power of two"):
        gated_delta_rule(*tokens, chunk=24)
    q, k, v, g, beta = tokens
    with pytest.raises(ValueError, match="5 value heads are not a multiple of 2 key heads"):
        gated_delta_rule(q, k, v[:, :, :5], g[:, :, :5], beta[:, :, :5])
