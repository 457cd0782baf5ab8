"""Decoding with a drafter gives what decoding without gives, whatever the drafter proposes."""

from __future__ import annotations

import dataclasses

import generation_toy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafters import Scripted, Tapped, scripted, simulate
from generation_toy import ToyModule, make_toy, reference_greedy

from fp4jax.errors import GenerationError
from fp4jax.generation import batch_generate, generate, generate_tokens, stream_generate
from fp4jax.generation.drafts import Draft
from fp4jax.generation.prompt_lookup import PromptLookup
from fp4jax.generation.requests import make_requests
from fp4jax.generation.sampling_params import SamplingParams
from fp4jax.generation.speculative_session import SpeculativeSession

VOCAB, COUNT = 61, 30
PROMPTS = ((5, 9, 20), (1, 2, 3, 4, 5, 6, 7, 8, 9), (40,), (17, 17, 30, 2, 60, 11))
WRONG = np.zeros((4, COUNT), bool)
WRONG[1] = True
WRONG[2:] = np.random.default_rng(0).random((2, COUNT)) < 0.4


@pytest.fixture(scope="module")
def answers(toy):
    return [reference_greedy(toy.params, prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("block_size", range(2, 9))
def test_right_wrong_and_mixed_drafts_in_one_ragged_batch(toy, answers, block_size):
    draft = scripted(PROMPTS, answers, WRONG, VOCAB, block_size)
    limits = [COUNT, COUNT, 23, COUNT - 1]
    rows = [SamplingParams(max_tokens=n) for n in limits]
    found = batch_generate(toy, None, PROMPTS, sampling=rows, draft=draft, prefill_chunk=4)
    histogram = np.zeros(block_size, int)
    for b, count in enumerate(limits):
        steps, drafted = simulate(WRONG[b], count, block_size)
        assert list(found.tokens[b]) == answers[b][:count]
        assert list(found.from_draft[b]) == drafted
        histogram += steps
    assert found.stats.acceptance.histogram == tuple(histogram)
    assert found.stats.acceptance.steps == histogram.sum()
    tokens = sum(limits) - len(limits)
    assert found.stats.acceptance.mean_accepted_length == tokens / histogram.sum()
    assert found.finish_reasons == ("length",) * 4
    plain = batch_generate(toy, None, PROMPTS, sampling=rows)
    assert plain.stats.acceptance is None and not any(map(any, plain.from_draft))
    for b in range(4):
        np.testing.assert_allclose(found.logprobs[b], plain.logprobs[b], atol=2e-5)


def test_stop_ids_and_limits_anywhere_in_a_block(toy, answers):
    """A row that is always right, whose end falls on every place of a block of 5."""
    draft = scripted(PROMPTS[:1], answers[:1], WRONG[:1], VOCAB, 5)
    answer = answers[0]
    for count in range(1, 13):
        found = generate_tokens(toy, PROMPTS[0], max_tokens=count, draft=draft)
        assert (list(found.tokens), found.finish_reason) == (answer[:count], "length")
        stop = answer[count - 1]
        first = answer.index(stop) + 1
        found = generate_tokens(
            toy, PROMPTS[0], max_tokens=COUNT, draft=draft, stop_token_ids=[stop]
        )
        assert (list(found.tokens), found.finish_reason) == (answer[:first], "stop")
        assert list(found.from_draft) == simulate(WRONG[0], first, 5)[1]


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 3},
        {"temp": 1.0, "seed": 5, "top_k": 20},
        {
            "repetition_penalty": 1.4, "repetition_context_size": 5, "presence_penalty": 0.5,
            "frequency_penalty": 0.3, "logit_bias": {4: 2.0, 7: -1.0},
        },
    ],
)  # fmt: skip
def test_every_call_gives_the_same(toy, tokenizer, options):
    """One stream, one answer, one row of a batch; greedy ones what is given without a draft."""
    options = {"max_tokens": 40, **options}
    with_draft = {"draft": PromptLookup(ngram=2), "num_draft_tokens": 4, **options}
    steps = list(stream_generate(toy, tokenizer, "theprompt", **with_draft))
    text = "".join(step.text for step in steps)
    assert [s.finish_reason for s in steps] == [None] * 39 + ["length"]
    assert [s.generation_tokens for s in steps] == list(range(1, 41))
    assert generate(toy, tokenizer, "theprompt", **with_draft) == text
    batch = batch_generate(toy, tokenizer, ["theprompt", "abcabcabca"], **with_draft)
    assert batch.texts[0] == text
    assert batch.tokens[0] == tuple(s.token for s in steps)
    assert batch.from_draft[0] == tuple(s.from_draft for s in steps)
    assert 0 < sum(batch.from_draft[0]) < 40
    np.testing.assert_allclose(batch.logprobs[0], [s.logprob for s in steps], atol=2e-5)
    assert steps[-1].acceptance.steps < 39
    if "temp" in options:
        return
    plain = batch_generate(toy, tokenizer, ["theprompt", "abcabcabca"], **options)
    assert plain.tokens == batch.tokens and plain.texts == batch.texts
    np.testing.assert_allclose(batch.logprobs[0], plain.logprobs[0], atol=2e-5)
    for drafted, alone in zip(batch.top_logprobs[0], plain.top_logprobs[0], strict=True):
        assert [token for token, _ in drafted] == [token for token, _ in alone]


def test_stop_strings_in_a_block_are_the_same_everywhere(toy, tokenizer):
    options = {"max_tokens": 40}
    free = generate(toy, tokenizer, "theprompt", **options)
    draft = {"draft": PromptLookup(), **options}
    for begin in (0, 3, 9, 18, 30):
        stop = free[begin : begin + 3]
        cut = free[: free.index(stop)]
        steps = list(stream_generate(toy, tokenizer, "theprompt", stop=["never", stop], **draft))
        batch = batch_generate(toy, tokenizer, ["theprompt", "wx"], stop=["never", stop], **draft)
        assert "".join(s.text for s in steps) == cut == batch.texts[0]
        assert steps[-1].finish_reason == "stop" == batch.finish_reasons[0]
        assert batch.tokens[0] == tuple(s.token for s in steps)
        plain = batch_generate(toy, tokenizer, ["theprompt", "wx"], stop=["never", stop], **options)
        assert (plain.texts, plain.tokens) == (batch.texts, batch.tokens)


def test_rows_draw_what_they_draw_alone(toy):
    rows = [
        SamplingParams(temp=1.2, seed=9, max_tokens=40),
        SamplingParams(max_tokens=33),
        SamplingParams(temp=0.7, seed=9, top_p=0.9, max_tokens=28),
        SamplingParams(temp=1.0, seed=2, presence_penalty=0.7, max_tokens=40),
    ]
    draft = Draft(Tapped(5), jnp.eye(24))
    batch = batch_generate(toy, None, PROMPTS, sampling=rows, draft=draft)
    again = batch_generate(toy, None, PROMPTS, sampling=rows, draft=draft)
    assert batch.tokens == again.tokens
    assert sum(map(sum, batch.from_draft)) > 0
    for prompt, row, tokens in zip(PROMPTS, rows, batch.tokens, strict=True):
        assert generate_tokens(toy, prompt, sampling=row, draft=draft).tokens == tokens


def test_a_whole_context_is_used(toy):
    """Blocks reach past the model's context; only what lies within it is kept."""
    prompt = [3, 1, 4] * 28
    draft = PromptLookup(block_size=8)
    found = generate_tokens(toy, prompt, max_tokens=50, draft=draft)
    assert list(found.tokens) == reference_greedy(toy.params, prompt, 12)


def test_logits_that_are_not_finite_end_a_row(toy):
    """A token inside an accepted block, whose scores overflow where it is seen."""
    prompt = PROMPTS[0]
    answer = reference_greedy(toy.params, prompt, 8)
    at = next(i for i in range(3, 8) if answer[i] not in [*prompt, *answer[:i]])
    broken = {**toy.params, "embedding": toy.params["embedding"].at[answer[at]].mul(1e36)}
    engine = dataclasses.replace(toy, params=broken)
    draft = scripted([prompt], [answer], WRONG[:1], VOCAB, 8)
    message = f"generated token {at + 2} are not finite"
    with pytest.raises(GenerationError, match=message):
        generate_tokens(engine, prompt, max_tokens=COUNT)
    with pytest.raises(GenerationError, match=message):
        generate_tokens(engine, prompt, max_tokens=COUNT, draft=draft)


def test_values_drafts_and_engines_do_not_trace_again(toy, monkeypatch):
    events = []
    monkeypatch.setattr(generation_toy, "tracing", lambda: events.append(1))
    engine = dataclasses.replace(toy, max_context=80)
    table = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (1, 90)), jnp.int32)

    def traced(model=engine, params=table, length=50, **options):
        events.clear()
        draft = Draft(Scripted(6), params)
        options = {"max_tokens": 20, "temp": 0.5, "seed": 1, "draft": draft, **options}
        generate_tokens(model, [1] * length, **options)
        return len(events)

    assert traced() == 2  # prefill and the verification pass
    other = dataclasses.replace(engine, module=ToyModule(), params=make_toy(seed=7).params)
    assert traced() == traced(other) == traced(params=table + 1) == 0
    assert traced(length=49, max_tokens=25, temp=1.5, seed=8) == 0
    assert traced(num_draft_tokens=3) == 2


def test_caches_are_donated_and_given_back(toy):
    draft = Draft(Tapped(4), jnp.eye(24))
    requests = make_requests(toy, None, [PROMPTS[0]], SamplingParams(max_tokens=20))
    session = SpeculativeSession(toy, requests, draft)
    session.prefill()
    state = session._state
    old = (state.target.cache.keys, state.draft.total)
    window = session.window()
    session.advance(1)
    assert all(array.is_deleted() for array in old)
    assert session.fetch(window).new(0) == 1
    del session, state, old, window
    generate_tokens(toy, PROMPTS[0], max_tokens=20, draft=draft)
    before = len(jax.live_arrays())
    generate_tokens(toy, PROMPTS[0], max_tokens=20, draft=draft)
    assert len(jax.live_arrays()) == before
