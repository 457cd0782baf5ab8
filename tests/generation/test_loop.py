"""The pure functions against a full recomputation in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation_toy import reference_greedy, reference_logits

from fp4jax.generation import loop
from fp4jax.generation.buckets import bucket
from fp4jax.generation.samplers import SamplingArrays, SamplingFeatures
from fp4jax.generation.sampling_params import SamplingParams
from fp4jax.generation.state import Limits

LENGTHS = (5, 12, 9)
WIDTH = 12


def ragged(seed=0):
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 61, n).tolist() for n in LENGTHS]
    tokens = np.full((3, WIDTH), 60, np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
    return rows, jnp.asarray(tokens), jnp.asarray(LENGTHS, jnp.int32)


def limits(stop_ids=(-1, -1, -1), max_tokens=(16, 7, 12)):
    return Limits(jnp.asarray(stop_ids, jnp.int32)[:, None], jnp.asarray(max_tokens, jnp.int32))


FEATURES = SamplingFeatures()
GREEDY = (SamplingParams(),) * 3


@functools.partial(jax.jit, static_argnames=("module", "chunk"))
def answer(module, params, tokens, lengths, sampling, ends, chunk=None):
    """A caller's own jitted function around the core."""
    return loop.complete(
        module, params, tokens, lengths, sampling, ends,
        features=FEATURES, capacity=28, size=16, dtype=jnp.float32, chunk=chunk,
    )  # fmt: skip


def test_buckets():
    expected = {0: 16, 1: 16, 16: 16, 17: 32, 33: 64, 65: 96, 97: 128, 129: 192, 193: 256}
    assert {n: bucket(n) for n in expected} == expected
    assert bucket(70, limit=80) == 80
    assert bucket(70, limit=60) == 70
    sizes = sorted({bucket(n) for n in range(1, 3000)})
    assert all(n <= bucket(n) <= max(2 * n, 16) for n in range(1, 3000))
    assert all(size % 16 == 0 for size in sizes)


@pytest.mark.parametrize("chunk", [None, 4])
def test_prefill_gives_the_logits_that_follow_each_row(toy, chunk):
    rows, tokens, lengths = ragged()
    run = jax.jit(loop.prefill, static_argnames=("module", "chunk"))
    cache = toy.module.init_cache(3, 20, jnp.float32)
    logits, cache = run(toy.module, toy.params, tokens, lengths, cache, chunk=chunk)
    assert cache.position.tolist() == list(LENGTHS)
    for b, row in enumerate(rows):
        expected = reference_logits(toy.params, row)[-1]
        np.testing.assert_allclose(logits[b], expected, rtol=0, atol=1e-5 * abs(expected).max())
    # Continue from that cache, one row resting.
    fed = jnp.asarray([7, 8, 9], jnp.int32)
    step = jax.jit(loop.decode_step, static_argnames="module")
    active = jnp.asarray([True, False, True])
    logits, cache = step(toy.module, toy.params, fed, cache, active)
    assert cache.position.tolist() == [6, 12, 10]
    for b in (0, 2):
        expected = reference_logits(toy.params, [*rows[b], 7 + b])[-1]
        np.testing.assert_allclose(logits[b], expected, rtol=0, atol=1e-5 * abs(expected).max())


def test_prefill_refuses_a_width_that_chunks_do_not_divide(toy):
    _, tokens, lengths = ragged()
    cache = toy.module.init_cache(3, 20, jnp.float32)
    with pytest.raises(ValueError, match="multiple of chunk=5"):
        loop.prefill(toy.module, toy.params, tokens, lengths, cache, chunk=5)


@pytest.mark.parametrize("chunk", [None, 4])
def test_whole_loop_equals_recomputation_in_float64(toy, chunk):
    rows, tokens, lengths = ragged()
    sampling = SamplingArrays.of(GREEDY, FEATURES)
    out = answer(toy.module, toy.params, tokens, lengths, sampling, limits(), chunk=chunk)
    assert out.count.tolist() == [16, 7, 12]
    assert out.finished.all() and not out.invalid.any()
    for b, row in enumerate(rows):
        count = int(out.count[b])
        expected = reference_greedy(toy.params, row, count)
        assert out.tokens[b, :count].tolist() == expected
        assert not out.tokens[b, count:].any()
        logits = reference_logits(toy.params, [*row, *expected])[len(row) - 1 : -1]
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        np.testing.assert_allclose(
            out.logprobs[b, :count], logprobs[np.arange(count), expected], atol=2e-5
        )


def test_a_stop_id_ends_its_own_row_only(toy):
    rows, tokens, lengths = ragged()
    greedy = [reference_greedy(toy.params, row, 16) for row in rows]
    stop = greedy[0][3]
    sampling = SamplingArrays.of(GREEDY, FEATURES)
    out = answer(
        toy.module, toy.params, tokens, lengths, sampling, limits((stop, -1, -1), (16, 16, 16))
    )
    first = greedy[0].index(stop) + 1
    assert out.count.tolist() == [first, 16, 16]
    assert out.tokens[0, :first].tolist() == greedy[0][:first]
    assert out.tokens[2].tolist() == greedy[2]


def test_one_loop_and_pieces_of_it_are_the_same_bits(toy):
    _, tokens, lengths = ragged(3)
    params = [SamplingParams(temp=1.0, seed=b, logprobs=2, presence_penalty=0.5) for b in range(3)]
    features = SamplingFeatures.of(params)
    sampling = SamplingArrays.of(params, features)
    ends = limits(max_tokens=(16, 9, 12))

    @jax.jit
    def begin(params, tokens, lengths, sampling, ends):
        cache = toy.module.init_cache(3, 28, jnp.float32)
        hidden, cache = loop.prefill_chunk(toy.module, params, tokens, lengths, cache)
        return loop.start(
            toy.module, params, hidden, cache, tokens, lengths, sampling, ends,
            features=features, size=16,
        )  # fmt: skip

    run = jax.jit(loop.run_loop, static_argnames=("module", "features"))

    def until(state, limit):
        rest = (sampling, ends, jnp.int32(limit), jnp.zeros(3, jnp.bool_))
        return run(toy.module, toy.params, state, *rest, features=features)

    whole = until(begin(toy.params, tokens, lengths, sampling, ends), 16)
    pieces = begin(toy.params, tokens, lengths, sampling, ends)
    for limit in (1, 2, 3, 8, 16, 16):
        pieces = until(pieces, limit)
    jax.tree.map(np.testing.assert_array_equal, whole, pieces)
    assert whole.output.count.tolist() == [16, 9, 12]
    # Rows that have ended are fed nothing more; the last token of a row never is.
    assert whole.cache.position.tolist() == [5 + 15, 12 + 8, 9 + 11]
    state = begin(toy.params, tokens, lengths, sampling, ends)
    stopped = jnp.asarray([False, True, False])
    cut = run(toy.module, toy.params, state, sampling, ends, jnp.int32(16), stopped,
              features=features)  # fmt: skip
    assert cut.output.count.tolist() == [16, 1, 12]
    np.testing.assert_array_equal(cut.output.tokens[0], whole.output.tokens[0])


def test_nothing_is_captured(toy):
    _, tokens, lengths = ragged()
    sampling = SamplingArrays.of(GREEDY, FEATURES)

    def run(params, tokens, lengths, sampling, ends):
        return answer(toy.module, params, tokens, lengths, sampling, ends)

    jaxpr = jax.make_jaxpr(run)(toy.params, tokens, lengths, sampling, limits())
    assert not jaxpr.consts
