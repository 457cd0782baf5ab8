"""The sampler against float64 numpy written by sorting, and against the formulas of penalties."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fp4jax.generation import samplers
from fp4jax.generation.samplers import SamplingArrays, SamplingFeatures, init_sampler, sample
from fp4jax.generation.sampling_params import SamplingParams
from fp4jax.generation.truncation import temper, truncate

VOCAB = 40
jit_sample = jax.jit(sample, static_argnames="features")


def ranked(scores):
    """Ids by score, largest first, ties by lower id."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def reference(logits, params: SamplingParams) -> np.ndarray:
    """Float64 probabilities after temperature and truncation of unpenalized logits."""
    scores = np.asarray(logits, np.float64) / params.temp
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    order = ranked(scores)
    if params.top_k:
        probabilities[order[params.top_k :]] = 0
        probabilities /= probabilities.sum()
    if params.top_p < 1:
        mass = 0.0
        for token in order:
            share = probabilities[token]
            if mass >= params.top_p:
                probabilities[token] = 0
            mass += share
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


ALL = SamplingFeatures(stochastic=True, top_k=True, top_p=True, min_p=True)


def one_state(params, batch, vocab, prompt=(), features=None):
    """(values, features, state) of ``batch`` rows of the same prompt."""
    rows = params if isinstance(params, list) else [params] * batch
    features = features or SamplingFeatures.of(rows)
    arrays = SamplingArrays.of(rows, features)
    tokens = jnp.asarray(np.tile(np.asarray(prompt, np.int32), (batch, 1)))
    lengths = jnp.full(batch, len(prompt), jnp.int32)
    return arrays, features, init_sampler(arrays, features, tokens, lengths, vocab)


@jax.jit
def kept(logits, temp, top_k, top_p, min_p):
    return jnp.isfinite(truncate(temper(logits, temp), top_k=top_k, top_p=top_p, min_p=min_p))


@pytest.mark.parametrize("kind", ["normal", "ties", "signed zeros", "flat", "masked", "wide"])
def test_truncation_keeps_exactly_the_reference_set(kind):
    rng = np.random.default_rng(3)
    batch = 64
    logits = rng.normal(size=(batch, VOCAB)) * 2
    if kind in ("ties", "signed zeros"):
        logits = rng.integers(-3, 3 if kind == "ties" else 1, size=(batch, VOCAB)) * 1.0
        logits[logits == 0] = rng.choice([0.0, -0.0], size=int((logits == 0).sum()))
    elif kind == "flat":
        logits = np.zeros((batch, VOCAB))
    elif kind == "masked":
        logits[rng.random(logits.shape) < 0.5] = -np.inf
    elif kind == "wide":
        logits *= 50
    logits = logits.astype(np.float32)
    rows = [
        SamplingParams(
            temp=float(rng.choice([0.3, 1.0, 1.7])),
            top_k=int(rng.choice([0, 1, 2, 7, VOCAB, 10 * VOCAB])),
            top_p=float(rng.choice([1.0, 0.013, 0.31, 0.77, 0.983])),
            min_p=float(rng.choice([0.0, 0.017, 0.23, 1.0])),
        )
        for _ in range(batch)
    ]
    arrays = SamplingArrays.of(rows, SamplingFeatures.of(rows))
    found = np.asarray(
        kept(jnp.asarray(logits), arrays.temp, arrays.top_k, arrays.top_p, arrays.min_p)
    )
    for b, row in enumerate(rows):
        expected = reference(logits[b], row) > 0
        finite = np.isfinite(logits[b])
        np.testing.assert_array_equal(found[b] & finite, expected & finite, err_msg=f"{b} {row}")


@pytest.mark.parametrize(
    "options",
    [
        {"temp": 1.0},
        {"temp": 0.6, "top_k": 5},
        {"temp": 1.5, "top_p": 0.8},
        {"temp": 2.0, "min_p": 0.2},
        {"temp": 1.3, "top_k": 7, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_draws_follow_the_distribution(options):
    logits = np.random.default_rng(1).normal(size=11).astype(np.float32) * 1.5
    draws = 20_000
    params = SamplingParams(seed=7, **options)
    arrays, features, state = one_state(params, draws, 11, features=ALL)
    arrays = dataclasses.replace(arrays, seed=jnp.arange(draws, dtype=jnp.uint32))
    result, _ = jit_sample(jnp.tile(logits, (draws, 1)), arrays, state, features)
    counts = np.bincount(np.asarray(result.tokens), minlength=11)
    expected = reference(logits, params) * draws
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    test = stats.chisquare(counts[possible], expected[possible])
    assert test.pvalue > 1e-3


def test_steps_of_one_row_are_independent_draws():
    arrays, features, state = one_state(SamplingParams(temp=1.0, seed=3), 1, 4)

    def body(state, _):
        result, state = sample(jnp.zeros((1, 4)), arrays, state, features)
        return state, result.tokens[0]

    _, tokens = jax.lax.scan(body, state, length=8000)
    pairs = np.asarray(tokens[:-1]) * 4 + np.asarray(tokens[1:])
    assert stats.chisquare(np.bincount(pairs, minlength=16)).pvalue > 1e-3


def test_a_row_draws_what_it_draws_alone():
    rng = np.random.default_rng(5)
    logits = jnp.asarray(rng.normal(size=(4, VOCAB)).astype(np.float32))
    rows = [
        SamplingParams(temp=1.0, seed=11, top_k=9),
        SamplingParams(),
        SamplingParams(temp=0.7, seed=11, top_p=0.9),
        SamplingParams(presence_penalty=1.0, repetition_penalty=1.3, logit_bias={3: 2.0}),
    ]
    arrays, features, state = one_state(rows, 4, VOCAB, prompt=[1, 2, 3])
    together, _ = jit_sample(logits, arrays, state, features)
    for b, row in enumerate(rows):
        arrays, features, state = one_state(row, 1, VOCAB, prompt=[1, 2, 3])
        alone, _ = jit_sample(logits[b : b + 1], arrays, state, features)
        assert int(alone.tokens[0]) == int(together.tokens[b])
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[b], rtol=1e-6)


def test_seed_and_step_alone_decide():
    logits = jnp.zeros((64, 1000))
    params = [SamplingParams(temp=1.0, seed=s) for s in range(64)]
    arrays, features, state = one_state(params, 64, 1000)
    first, after = jit_sample(logits, arrays, state, features)
    again, _ = jit_sample(logits, arrays, state, features)
    second, _ = jit_sample(logits, arrays, after, features)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert len(set(np.asarray(first.tokens).tolist())) > 55
    assert (np.asarray(first.tokens) != np.asarray(second.tokens)).sum() > 55


def test_greedy_limits():
    logits = np.random.default_rng(2).normal(size=(8, VOCAB)).astype(np.float32)
    logits[:, 20] = logits[:, 30] = 5.0  # a tie goes to the lower id
    options = (
        {}, {"top_k": 3, "top_p": 0.1, "min_p": 0.9}, {"temp": 1.0, "top_k": 1},
        {"temp": 1.0, "top_p": 1e-6},
    )  # fmt: skip
    rows = [SamplingParams(seed=1, **options[i % 4]) for i in range(8)]
    arrays, features, state = one_state(rows, 8, VOCAB, features=ALL)
    result, _ = jit_sample(jnp.asarray(logits), arrays, state, features)
    np.testing.assert_array_equal(result.tokens, 20)
    greedy, features, state = one_state(SamplingParams(), 8, VOCAB)
    result, _ = jit_sample(jnp.asarray(logits), greedy, state, features)
    np.testing.assert_array_equal(result.tokens, 20)
    logits[:, 30] = 4.99
    arrays, _, state = one_state(SamplingParams(temp=1e-30, seed=1), 8, VOCAB, features=ALL)
    result, _ = jit_sample(jnp.asarray(logits), arrays, state, ALL)
    np.testing.assert_array_equal(result.tokens, 20)


def penalized(logits, params: SamplingParams, prompt, output):
    """The formulas of the documentation, one token at a time, in float64."""
    scores = np.asarray(logits, np.float64).copy()
    for token, value in params.bias_pairs:
        scores[token] += value
    context = [*prompt, *output]
    if params.repetition_context_size is not None:
        context = context[-params.repetition_context_size :]
    for token in set(context):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(output):
        scores[token] -= params.presence_penalty
        scores[token] -= params.frequency_penalty * output.count(token)
    return scores


def test_bias_and_penalties_follow_their_formulas_over_steps():
    vocab, steps = 12, 25
    rows = [
        SamplingParams(repetition_penalty=1.4),
        SamplingParams(repetition_penalty=1.8, repetition_context_size=3),
        SamplingParams(repetition_penalty=0.7, repetition_context_size=5),
        SamplingParams(repetition_penalty=1.5, repetition_context_size=20),
        SamplingParams(presence_penalty=1.1),
        SamplingParams(frequency_penalty=0.4, logit_bias={2: 1.5, 7: -np.inf}),
        SamplingParams(
            presence_penalty=-0.3, frequency_penalty=0.9, repetition_penalty=1.2,
            logit_bias={0: -3.0},
        ),
        SamplingParams(),
    ]  # fmt: skip
    prompts = [[1, 2, 3, 1], [4, 4, 5, 6, 7], [2], [0, 1, 2], [3, 3], [9], [1, 1, 1, 8], [5, 6]]
    features = SamplingFeatures.of(rows)
    arrays = SamplingArrays.of(rows, features)
    padded = np.full((8, 6), 11, np.int32)  # the padding id must not be penalized
    for b, prompt in enumerate(prompts):
        padded[b, : len(prompt)] = prompt
    lengths = jnp.asarray([len(p) for p in prompts], jnp.int32)
    state = init_sampler(arrays, features, jnp.asarray(padded), lengths, vocab)
    rng, outputs = np.random.default_rng(0), [[] for _ in rows]
    penalize = jax.jit(samplers.penalize, static_argnames="features")
    for _ in range(steps):
        logits = rng.normal(size=(8, vocab)).astype(np.float32)
        found = np.asarray(penalize(jnp.asarray(logits), arrays, state, features))
        expected = [penalized(logits[b], row, prompts[b], outputs[b]) for b, row in enumerate(rows)]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        result, state = jit_sample(jnp.asarray(logits), arrays, state, features)
        for b, token in enumerate(np.asarray(result.tokens).tolist()):
            assert token == int(np.argmax(expected[b]))
            outputs[b].append(token)
    assert not any(token == 7 for token in outputs[5])


def test_logprobs_are_the_models_own():
    logits = np.random.default_rng(8).normal(size=(3, VOCAB)).astype(np.float32) * 3
    logits[1, 5:] = -np.inf
    params = SamplingParams(
        temp=0.4, top_k=2, logprobs=4, seed=0, logit_bias={1: 9.0}, presence_penalty=1.0
    )
    arrays, features, state = one_state(params, 3, VOCAB)
    result, _ = jit_sample(jnp.asarray(logits), arrays, state, features)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    tokens = np.asarray(result.tokens)
    # A few float32 roundings of numbers as large as the largest logit.
    close = functools.partial(
        np.testing.assert_allclose, rtol=0, atol=4e-7 * abs(wide[[0, 2]]).max()
    )
    close(result.logprobs, expected[np.arange(3), tokens])
    for b in range(3):
        assert np.asarray(result.top_tokens[b]).tolist() == ranked(expected[b])[:4]
        best = expected[b][ranked(expected[b])[:4]]
        close(result.top_logprobs[b], best)


def test_logits_that_are_not_finite_are_flagged():
    logits = np.zeros((5, 6), np.float32)
    logits[1, 3] = np.nan
    logits[2, 3] = np.inf
    logits[3] = -np.inf
    logits[4, :5] = -np.inf
    for temp in (0.0, 1.0):
        params = SamplingParams(temp=temp, top_k=3, top_p=0.5, seed=0)
        arrays, features, state = one_state(params, 5, 6, features=ALL)
        result, _ = jit_sample(jnp.asarray(logits), arrays, state, features)
        assert np.asarray(result.valid).tolist() == [True, False, False, False, True]
        assert int(result.tokens[4]) == 5
        assert (np.asarray(result.tokens) < 6).all()
