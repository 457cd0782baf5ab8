"""The Python calls: one answer whichever way it is asked for, and what is refused."""

from __future__ import annotations

import dataclasses
import threading

import jax
import numpy as np
import pytest
from generation_toy import ToyTokenizer, make_toy, reference_greedy

from fp4jax.errors import ConfigError, GenerationError, SamplingError
from fp4jax.generation import (
    batch_generate,
    driving,
    generate,
    generate_tokens,
    stream_generate,
)
from fp4jax.generation.prompt_lookup import PromptLookup
from fp4jax.generation.requests import make_requests
from fp4jax.generation.sampling_params import SamplingParams
from fp4jax.generation.session import Session

PROMPT = "theprompt"
DRAFT = PromptLookup(ngram=2, block_size=4)


def collect(steps):
    steps = list(steps)
    assert [s.finish_reason for s in steps[:-1]] == [None] * (len(steps) - 1)
    return "".join(s.text for s in steps), [s.token for s in steps], steps[-1].finish_reason


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 20},
        {"max_tokens": 1},
        {"max_tokens": 20, "temp": 1.0, "seed": 5, "logprobs": 3},
        {
            "max_tokens": 20, "temp": 1.3, "seed": 5, "top_k": 30, "top_p": 0.95, "min_p": 0.01,
            "repetition_penalty": 1.2, "repetition_context_size": 6, "frequency_penalty": 0.3,
            "logit_bias": {4: 2.0},
        },
    ],
)  # fmt: skip
def test_every_call_gives_the_same(toy, tokenizer, options):
    ids = tokenizer.encode(PROMPT)
    steps = list(stream_generate(toy, tokenizer, PROMPT, **options))
    text, tokens, reason = collect(steps)
    assert generate(toy, tokenizer, PROMPT, **options) == text
    assert generate(toy, tokenizer, ids, **options) == text
    chat = [{"role": "user", "content": "the"}, {"role": "user", "content": "prompt"}]
    assert generate(toy, tokenizer, chat, **options) == text
    batch = batch_generate(toy, tokenizer, [PROMPT], **options)
    alone = generate_tokens(toy, np.asarray(ids), **options)
    assert batch.texts == (text,)
    assert batch.tokens == (tuple(tokens),) == (alone.tokens,)
    assert batch.finish_reasons == (reason,) == (alone.finish_reason,) == ("length",)
    assert batch.logprobs == (tuple(s.logprob for s in steps),) == (alone.logprobs,)
    assert batch.top_logprobs == (tuple(s.top_logprobs for s in steps),) == (alone.top_logprobs,)
    assert {len(s.top_logprobs) for s in steps} == {options.get("logprobs", 0)}
    if "temp" not in options:
        assert tokens == reference_greedy(toy.params, ids, options["max_tokens"])


def test_stop_strings_across_tokens_are_the_same_everywhere(toy, tokenizer):
    options = {"max_tokens": 20, "temp": 1.5, "seed": 2}
    free = generate(toy, tokenizer, PROMPT, **options)
    assert len(free) > 20  # some tokens are two letters
    for begin in (0, 3, 9, 18):
        stop = free[begin : begin + 3]
        cut = free[: free.index(stop)]
        text, tokens, reason = collect(
            stream_generate(toy, tokenizer, PROMPT, stop=["never", stop], **options)
        )
        batch = batch_generate(toy, tokenizer, [PROMPT], stop=["never", stop], **options)
        assert text == cut == generate(toy, tokenizer, PROMPT, stop=stop, **options)
        assert reason == "stop" and batch.finish_reasons == ("stop",)
        assert batch.tokens == (tuple(tokens),) and len(tokens) <= 20
    assert generate(toy, tokenizer, PROMPT, stop="never", **options) == free


def test_a_row_that_met_its_stop_string_is_ended_on_the_device(toy, tokenizer, monkeypatch):
    masks = []

    class Watched(driving.Session):
        def advance(self, tokens=None, stopped=None):
            masks.append(stopped.tolist())
            super().advance(tokens, stopped)

    options = {"max_tokens": 20, "temp": 0.8, "logprobs": 3, "seed": 4}
    free = batch_generate(toy, tokenizer, list("wxyz"), **options)
    own = next(c for c in free.texts[2] if all(c not in free.texts[i] for i in (0, 1, 3)))
    monkeypatch.setattr(driving, "Session", Watched)
    batch = batch_generate(toy, tokenizer, list("wxyz"), stop=own, **options)
    assert batch.finish_reasons == ("length", "length", "stop", "length")
    met = len(batch.tokens[2]) <= 1 + driving.STOP_CHECK_TOKENS
    assert masks == [[False] * 4, [False, False, met, False]] and met


def test_ragged_rows_get_what_they_get_alone(toy, tokenizer):
    prompts = ["a", "abcdefgh", [1, 2, 3, 60], "xyz"]
    options = {"max_tokens": 20, "temp": 0.8, "stop": ["qr", "a"], "logprobs": 3}
    batch = batch_generate(toy, tokenizer, prompts, seed=2**32 - 2, **options)
    assert len(set(map(len, batch.tokens))) > 1
    for i, prompt in enumerate(prompts):
        seed = (2**32 - 2 + i) % 2**32
        alone = batch_generate(toy, tokenizer, [prompt], seed=seed, **options)
        assert alone.texts[0] == batch.texts[i]
        assert alone.tokens[0] == batch.tokens[i]
        assert alone.finish_reasons[0] == batch.finish_reasons[i]
        np.testing.assert_allclose(alone.logprobs[0], batch.logprobs[i], atol=2e-5)
    assert batch.stats.prompt_tokens == 1 + 8 + 4 + 3
    assert batch.stats.generation_tokens == sum(map(len, batch.tokens))
    each = [SamplingParams(seed=(2**32 - 2 + i) % 2**32, **options) for i in range(4)]
    each[1] = SamplingParams(max_tokens=3)
    mixed = batch_generate(toy, tokenizer, prompts, sampling=each)
    assert mixed.tokens[0] == batch.tokens[0] and mixed.tokens[3] == batch.tokens[3]
    greedy = reference_greedy(toy.params, tokenizer.encode(prompts[1]), 3)
    assert mixed.tokens[1] == tuple(greedy)
    assert mixed.top_logprobs[1] == ((),) * 3


def test_end_of_sequence_ids_are_a_union(toy, tokenizer):
    ids = tokenizer.encode(PROMPT)
    free = reference_greedy(toy.params, ids, 20)
    plain = generate(toy, tokenizer, PROMPT, max_tokens=20)
    at = next(i for i in range(2, 20) if free[i] not in free[:i])
    model = dataclasses.replace(toy, eos_token_ids=(free[at],))
    speaks = ToyTokenizer(eos_token_ids=(free[at],))
    cases = (
        (model, tokenizer, {}),
        (toy, speaks, {}),
        (toy, tokenizer, {"stop_token_ids": [free[at]]}),
    )
    for engine, words, more in cases:
        batch = batch_generate(engine, words, [PROMPT], max_tokens=20, **more)
        assert batch.tokens[0] == tuple(free[: at + 1])
        assert batch.finish_reasons == ("stop",)
        assert plain.startswith(batch.texts[0]) and batch.texts[0] != plain
        assert (
            collect(stream_generate(engine, words, PROMPT, max_tokens=20, **more))[0]
            == (batch.texts[0])
        )
    assert generate(model, speaks, PROMPT, max_tokens=20, ignore_eos=True) == plain
    stopped = generate_tokens(model, ids, max_tokens=20, ignore_eos=True, stop_token_ids=[free[at]])
    assert stopped.tokens == tuple(free[: at + 1])


def test_long_prompts_go_in_chunks(toy):
    prompts = [np.random.default_rng(9).integers(0, 61, n).tolist() for n in (50, 20, 33)]
    events = []
    batch = batch_generate(
        toy, None, prompts, max_tokens=4, prefill_chunk=16,
        progress=lambda *event: events.append(event),
    )  # fmt: skip
    for prompt, tokens in zip(prompts, batch.tokens, strict=True):
        assert list(tokens) == reference_greedy(toy.params, prompt, 4)
    assert [e for e in events if e[0] == "prefill"] == [
        ("prefill", 48, 103), ("prefill", 84, 103), ("prefill", 101, 103), ("prefill", 103, 103),
    ]  # fmt: skip
    with pytest.raises(GenerationError, match="prefill_chunk=0"):
        generate_tokens(toy, prompts[0], prefill_chunk=0)


def test_max_tokens_is_clipped_to_the_context(toy):
    result = generate_tokens(toy, [1] * 90, max_tokens=50)
    assert result.finish_reason == "length"
    assert list(result.tokens) == reference_greedy(toy.params, [1] * 90, 6)


def test_seed_none_draws_afresh_and_a_seed_repeats(toy):
    def draw(**options):
        return generate_tokens(toy, [1, 2], max_tokens=20, temp=5.0, **options).tokens

    assert draw() != draw()
    assert draw(seed=3) == draw(seed=3) != draw(seed=4)


def refused(tokenizer):
    ok = [1, 2]
    return [
        (GenerationError, "empty", ("",), {}),
        (GenerationError, "empty", ([],), {}),
        (GenerationError, r"96 tokens.* context of 96; shorten it to at most 95", ([1] * 96,), {}),
        (GenerationError, r"token id 61 at position 1; .* 0 to 60", ([1, 61],), {}),
        (GenerationError, "token id -1", ([-1],), {}),
        (GenerationError, "flat list of token ids", ([[1, 2]],), {}),
        (GenerationError, "flat list of token ids", (5,), {}),
        (SamplingError, "max_tokens=0", (ok,), {"max_tokens": 0}),
        (SamplingError, r"top_p=1.5 must be in \(0, 1\]", (ok,), {"top_p": 1.5}),
        (SamplingError, "temp=nan", (ok,), {"temp": float("nan")}),
        (SamplingError, "stop_token_ids names token 61", (ok,), {"stop_token_ids": [61]}),
        (SamplingError, "did you mean 'temp'", (ok,), {"temperature": 1}),
        (ConfigError, "is no drafter", (ok,), {"draft": object()}),
        (ConfigError, "num_draft_tokens=0", (ok,), {"draft": DRAFT, "num_draft_tokens": 0}),
        (ConfigError, "whole number", (ok,), {"draft": DRAFT, "num_draft_tokens": 1.5}),
    ]


@pytest.mark.parametrize("case", range(15))
def test_refused_before_any_device_work(toy, tokenizer, case):
    error, message, (prompt,), options = refused(tokenizer)[case]
    # An engine without module and parameters: whatever touches them fails differently.
    engine = dataclasses.replace(toy, module=None, params=None)
    for call in (generate, stream_generate):  # a stream refuses before its first step
        with pytest.raises(error, match=message):
            call(engine, tokenizer, prompt, **options)
    with pytest.raises(error, match=message):
        generate_tokens(engine, prompt if prompt != "" else [], **options)
    with pytest.raises(error, match=message):
        batch_generate(engine, tokenizer, [[1], prompt], **options)


def test_batch_refusals(toy, tokenizer):
    engine = dataclasses.replace(toy, module=None, params=None)
    message = [{"role": "user", "content": "a"}]
    for prompts, text in (
        ([], "non-empty list"),
        ("a", "non-empty list"),
        (message, "wrap|list of"),
    ):
        with pytest.raises(GenerationError, match=text):
            batch_generate(engine, tokenizer, prompts)
    with pytest.raises(GenerationError, match="prompt 1 is empty"):
        batch_generate(engine, tokenizer, ["a", ""])
    with pytest.raises(SamplingError, match="1 entries for 2 prompts"):
        batch_generate(engine, tokenizer, ["a", "b"], sampling=[SamplingParams()])
    with pytest.raises(SamplingError, match="needs a tokenizer"):
        generate_tokens(engine, [1], stop="x")
    with pytest.raises(GenerationError, match="needs a tokenizer"):
        batch_generate(engine, None, ["a"])
    with pytest.raises(GenerationError, match="needs a tokenizer"):
        batch_generate(engine, None, [message])


def test_logits_that_are_not_finite_are_an_error(toy, tokenizer):
    ids = tokenizer.encode(PROMPT)
    first = reference_greedy(toy.params, ids, 1)[0]
    assert first not in ids
    broken = {**toy.params, "embedding": toy.params["embedding"].at[first].set(np.nan)}
    engine = dataclasses.replace(toy, params=broken)
    with pytest.raises(GenerationError, match="generated token 2 are not finite"):
        generate(engine, tokenizer, PROMPT, max_tokens=20)
    steps = stream_generate(engine, tokenizer, PROMPT, max_tokens=20)
    assert next(steps).token == first
    with pytest.raises(GenerationError, match="generated token 2 are not finite"):
        next(steps)
    with pytest.raises(GenerationError, match="generated token 2 of row 1 are not finite"):
        batch_generate(engine, tokenizer, ["zz", PROMPT], max_tokens=20)


def live() -> int:
    return len(jax.live_arrays())


def test_device_buffers_are_given_back(toy, tokenizer):
    def stop_after(count, how):
        steps = stream_generate(toy, tokenizer, PROMPT, max_tokens=20)
        for _ in range(count):
            next(steps)
        how(steps)

    def interrupt(steps):
        with pytest.raises(KeyboardInterrupt):
            steps.throw(KeyboardInterrupt)

    generate(toy, tokenizer, PROMPT, max_tokens=20)
    before = live()
    for _ in range(3):
        generate(toy, tokenizer, PROMPT, max_tokens=20)
        generate(toy, tokenizer, PROMPT, max_tokens=20, stop="never")
        batch_generate(toy, tokenizer, [PROMPT], max_tokens=20)
        stop_after(20, list)
        stop_after(5, lambda steps: steps.close())
        stop_after(5, interrupt)
        assert live() == before


def test_the_cache_is_donated(toy, tokenizer):
    session = Session(toy, make_requests(toy, tokenizer, [PROMPT], SamplingParams(max_tokens=20)))
    session.prefill()
    old = session._state.cache.keys
    window = session.window()
    session.advance(4)
    assert old.is_deleted()
    assert session.fetch(window).output.tokens.shape == (
        1,
        1,
    )  # a copy, which donation leaves alone


def test_two_threads_at_once(toy, tokenizer):
    engines = [toy, make_toy(seed=1)]
    options = {"max_tokens": 20, "temp": 1.0, "seed": 3}
    expected = [generate(engine, tokenizer, PROMPT, **options) for engine in engines]
    assert expected[0] != expected[1]
    found = [[], []]

    def work(i):
        with jax.numpy_dtype_promotion("strict"):  # a thread has its own setting
            for _ in range(3):
                found[i].append(generate(engines[i], tokenizer, PROMPT, **options))
                steps = stream_generate(engines[i], tokenizer, PROMPT, **options)
                found[i].append(collect(steps)[0])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[text] * 6 for text in expected]


def test_steps_report_counts_and_rates(toy, tokenizer):
    steps = list(stream_generate(toy, tokenizer, PROMPT, max_tokens=5))
    assert [s.generation_tokens for s in steps] == [1, 2, 3, 4, 5]
    assert {s.prompt_tokens for s in steps} == {len(PROMPT)}
    assert all(s.prompt_tps > 0 and s.peak_memory > 0 and not s.from_draft for s in steps)
    assert steps[0].generation_tps == 0
    assert all(s.generation_tps > 0 for s in steps[1:])
