"""What compiles again, and what does not: the toy counts the times it is traced."""

from __future__ import annotations

import dataclasses

import generation_toy
import pytest
from generation_toy import ToyModule, make_toy

from fp4jax.generation import batch_generate, generate, generate_tokens, stream_generate


@pytest.fixture
def engine(toy):
    """An engine no other test has compiled anything for: another context, other cache sizes."""
    return dataclasses.replace(toy, max_context=80)


@pytest.fixture
def traces(monkeypatch):
    """Counts how often a call traces the toy."""
    events = []
    monkeypatch.setattr(generation_toy, "tracing", lambda: events.append(1))

    def count(call) -> int:
        events.clear()
        call()
        return len(events)

    return count


def test_values_and_lengths_within_a_bucket_do_not_trace_again(engine, traces):
    hot = {"temp": 0.7, "seed": 1, "top_k": 5, "top_p": 0.9, "logit_bias": {3: 1.0}}

    def run(model=engine, prompt=(1, 2, 3, 4, 5), **changes):
        return lambda: generate_tokens(model, prompt, **{"max_tokens": 19, **hot, **changes})

    # 61 tokens pad to 64, 61 + 19 to the context's 80: sizes of this test's own.
    first = run(prompt=[1] * 61, max_tokens=19)
    assert traces(first) == 2  # prefill and decode, once each
    same = ToyModule()
    assert same is not engine.module
    other = dataclasses.replace(engine, module=same, params=make_toy(seed=7).params)
    for again in (
        first,
        run(prompt=[2] * 60, max_tokens=20),
        run(prompt=[2] * 61, max_tokens=17),
        run(prompt=[1] * 61, temp=1.9, seed=99, top_k=2, top_p=0.3),
        run(prompt=[1] * 61, logit_bias={9: -1.0, 4: 2.0}),
        run(prompt=[1] * 61, stop_token_ids=[5, 6, 7]),
        run(other, prompt=[1] * 61),
    ):
        assert traces(again) == 0
    assert traces(run(prompt=[1] * 61, min_p=0.1)) == 1  # a new feature: decode only


def test_streaming_and_stop_strings_share_what_generate_compiled(engine, tokenizer, traces):
    options = {"max_tokens": 19, "temp": 1.0, "seed": 0}
    prompt = "abc" * 20 + "d"
    generate(engine, tokenizer, prompt, **options)
    assert traces(lambda: list(stream_generate(engine, tokenizer, prompt, **options))) == 0
    assert traces(lambda: generate(engine, tokenizer, prompt, stop="zz", **options)) == 0
    assert traces(lambda: batch_generate(engine, tokenizer, [prompt], **options)) == 0


def test_compiling_is_reported_and_timed_only_where_something_compiles(engine, tokenizer):
    events = []

    def run():
        return batch_generate(
            engine, tokenizer, ["ab" * 25], max_tokens=30, logprobs=2,
            progress=lambda *event: events.append(event),
        ).stats  # fmt: skip

    assert run().compile_seconds > 0
    compiles = [event for event in events if event[0] == "compile"]
    assert compiles[0][1] < compiles[-1][1] <= compiles[-1][2] == 3
    events.clear()
    assert run().compile_seconds == 0
    assert events == [("prefill", 50, 50)]
