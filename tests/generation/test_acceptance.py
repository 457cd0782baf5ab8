"""Sampled tokens have the target's distribution, whatever the drafter's: chi-square tests."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafters import Bigram, Scripted
from generation_toy import ToyModule, make_toy, reference_logits
from scipy import stats

from fp4jax.generation import acceptance
from fp4jax.generation.samplers import SamplingArrays, SamplingFeatures
from fp4jax.generation.sampling_params import SamplingParams
from fp4jax.generation.speculation import complete_with_draft
from fp4jax.generation.state import Limits

VOCAB, ROWS, NEW, PROMPT = 6, 24_000, 4, [2, 5, 0]
FULL = SamplingParams(temp=1.3)
CUT = SamplingParams(temp=0.9, top_k=4, top_p=0.95, min_p=0.02)
PENAL = SamplingParams(temp=1.0, presence_penalty=1.0, logit_bias={1: 0.7})


@pytest.fixture(scope="module")
def engine():
    """The toy's tree cut down to a vocabulary of 6, and a drafter's bigrams, quite other ones."""
    params = make_toy(seed=3).params
    small = {
        "embedding": params["embedding"][:VOCAB],
        "mix": params["mix"],
        "head": params["head"][:, :VOCAB] * 0.25,
    }
    bigrams = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    return ToyModule(vocab_size=VOCAB), small, jnp.asarray(bigrams)


def distribution(logits: np.ndarray, sampling: SamplingParams, before) -> np.ndarray:
    """Float64 probabilities of the next token after bias, presence penalty and truncation."""
    logits = np.array(logits, np.float64)
    for token, value in sampling.bias_pairs:
        logits[token] += value
    logits[sorted(set(before))] -= sampling.presence_penalty
    scores = logits / sampling.temp
    p = np.exp(scores - scores.max())
    order = np.argsort(-p, kind="stable")
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    mass = np.cumsum(p[order]) - p[order]
    p[order[mass >= sampling.top_p]] = 0
    p[p < sampling.min_p * p.max()] = 0
    return p / p.sum()


def expected(params, sampling: SamplingParams) -> np.ndarray:
    """Probability of every sequence of ``NEW`` tokens."""
    table = np.ones((VOCAB,) * NEW)
    for length in range(NEW):
        for before in itertools.product(range(VOCAB), repeat=length):
            logits = reference_logits(params, [*PROMPT, *before])[-1]
            p = distribution(logits, sampling, before)
            table[before] *= p.reshape(-1, *(1,) * (NEW - length - 1))
    return table


def draws(engine, drafter, draft_params, sampling: SamplingParams) -> tuple[np.ndarray, float]:
    """``ROWS`` sequences in one call, and the share of tokens that were drafted."""
    module, params, _ = engine
    features = SamplingFeatures.of([sampling])
    rows = [SamplingParams.of(sampling, seed=seed) for seed in range(ROWS)]
    limits = Limits(jnp.full((ROWS, 1), -1, jnp.int32), jnp.full(ROWS, NEW, jnp.int32))

    @jax.jit  # a new one a call, so that what a test replaces is traced
    def run(params, draft_params, tokens, lengths, arrays, limits):
        return complete_with_draft(
            module, params, drafter, draft_params, tokens, lengths, arrays, limits,
            features=features, capacity=16, size=NEW, dtype=jnp.float32,
        )[0]  # fmt: skip

    tokens = jnp.tile(jnp.asarray(PROMPT, jnp.int32), (ROWS, 1))
    lengths = jnp.full(ROWS, len(PROMPT), jnp.int32)
    arrays = SamplingArrays.of(rows, features)
    out = run(params, draft_params, tokens, lengths, arrays, limits)
    assert out.count.tolist() == [NEW] * ROWS
    return np.asarray(out.tokens), float(out.from_draft[:, 1:].mean())


def p_value(tokens: np.ndarray, table: np.ndarray) -> float:
    """Of the chi-square test of whole sequences; rare ones are one category."""
    found = np.bincount(np.ravel_multi_index(tokens.T, table.shape), minlength=table.size)
    wanted = table.ravel() * len(tokens)
    assert not found[wanted == 0].any()
    rare = wanted < 5
    found = np.append(found[~rare], found[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    keep = wanted > 0
    return float(stats.chisquare(found[keep], wanted[keep]).pvalue)


@pytest.mark.parametrize("sampling", [FULL, CUT, PENAL], ids=["full", "cut", "penal"])
def test_drawn_drafts_leave_the_distribution_as_it_is(engine, sampling):
    tokens, drafted = draws(engine, Bigram(4), engine[2], sampling)
    assert 0.2 < drafted < 0.8
    assert p_value(tokens, expected(engine[1], sampling)) > 0.01


def test_drafts_without_chance_leave_it_as_it_is(engine):
    script = jnp.tile(jnp.asarray([0, 0, 0, 0, 1, 4, 3, 2], jnp.int32), (ROWS, 1))
    tokens, drafted = draws(engine, Scripted(3), script, FULL)
    assert 0.05 < drafted < 0.5
    assert p_value(tokens, expected(engine[1], FULL)) > 0.01


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_residual", lambda target, draft: target),
        ("_odds", lambda sampling, index, count: jnp.zeros((ROWS, count), jnp.float32)),
        ("_draft_probabilities", lambda proposal, vocab: jnp.full((ROWS, 3, vocab), 1 / vocab)),
    ],
)
def test_a_broken_rule_is_found(engine, monkeypatch, name, broken):
    """No residual; every possible proposal accepted; a draw taken for an even one."""
    monkeypatch.setattr(acceptance, name, broken)
    tokens, _ = draws(engine, Bigram(4), engine[2], FULL)
    assert p_value(tokens, expected(engine[1], FULL)) < 1e-6


def test_a_drafter_with_unusable_scores_changes_nothing(engine):
    """NaN scores always draw the same token: no chance, and no harm."""
    nothing = jnp.full((VOCAB, VOCAB), jnp.nan)
    tokens, _ = draws(engine, Bigram(3), nothing, FULL)
    assert p_value(tokens, expected(engine[1], FULL)) > 0.01


class Fixed(Scripted):
    """Draws each proposal from its own row of ``params``."""

    def propose(self, params, target, target_params, anchor, cache, draw):
        return draw.block(jnp.tile(params, (anchor.shape[0], 1, 1)))


def test_a_draft_with_the_targets_distribution_is_accepted(engine):
    """A target whose logits depend on the position alone, and a drafter that knows them."""
    module, params, _ = engine
    flat = {**params, "mix": 0 * params["mix"], "embedding": 0 * params["embedding"]}
    known = reference_logits(flat, [0] * (len(PROMPT) + 3))[len(PROMPT) : len(PROMPT) + 2]
    _, drafted = draws((module, flat, None), Fixed(3), jnp.asarray(known, jnp.float32), FULL)
    assert drafted > 0.66  # two of the three after the first, but for rounding
