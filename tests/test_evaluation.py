"""Perplexity and the benchmark's arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

import fp4jax
from fp4jax import evaluation
from fp4jax.benchmark import BenchResult, benchmark, decode_step_bytes, read_bandwidth
from fp4jax.errors import GenerationError
from fp4jax.evaluation import perplexity


@pytest.fixture(scope="module")
def model(oracles):
    return fp4jax.load_model(oracles / "qwen3-ct-nvfp4a16", dtype="float32", progress=False)


@pytest.fixture(scope="module")
def moe(oracles):
    return fp4jax.load_model(oracles / "qwen3moe-modelopt", dtype="float32", progress=False)


def text(model, size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, model.config.vocab_size, size)


def log_probabilities(model, ids: np.ndarray) -> np.ndarray:
    """Natural log of each token's probability after those before it, in float64."""
    logits = np.asarray(model(ids[None]), np.float64)[0]
    top = logits.max(-1, keepdims=True)
    normalized = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return normalized[np.arange(ids.size - 1), ids[1:]]


def test_one_window_is_the_plain_definition(model):
    ids = text(model, 60)
    found = perplexity(model, ids, window=64)
    nll = -log_probabilities(model, ids)
    assert (found.tokens, found.windows) == (59, 1)
    np.testing.assert_allclose(found.nll, nll.sum(), rtol=1e-5)
    np.testing.assert_allclose(found.value, np.exp(nll.mean()), rtol=1e-4)


@pytest.mark.parametrize("stride", [None, 5, 16, 1])
def test_windows_score_each_token_once_with_what_they_hold(model, stride):
    ids, window = text(model, 45), 16
    found = perplexity(model, ids, window=window, stride=stride)
    nll, done, begin = 0.0, 1, 0
    while done < ids.size:
        end = min(begin + window, ids.size)
        piece = np.pad(ids[begin:end], (0, window - (end - begin)))
        scores = -log_probabilities(model, piece)
        nll += scores[done - begin - 1 : end - begin - 1].sum()
        done, begin = end, min(begin + (stride or 8), end - 1)
    assert found.tokens == ids.size - 1
    np.testing.assert_allclose(found.nll, nll, rtol=1e-5)


def test_logits_are_held_in_pieces_of_a_window(model, monkeypatch):
    ids = text(model, 40)
    whole = perplexity(model, ids, window=41)
    monkeypatch.setattr(evaluation, "LOGIT_ROWS", 7)
    np.testing.assert_allclose(perplexity(model, ids, window=42).nll, whole.nll, rtol=1e-6)


def test_progress_ends_at_the_total(model):
    seen = []
    perplexity(
        model, text(model, 40), window=16, stride=16, progress=lambda *event: seen.append(event)
    )
    assert seen == [("perplexity", i + 1, 3) for i in range(3)]


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([1], {}, "at least two"),
        ([[1, 2]], {}, "flat list"),
        ([0.5, 1.0], {}, "flat list"),
        ([1, 10**6], {}, "vocabulary"),
        ([1, 2], {"window": 1}, "window=1"),
        ([1, 2], {"window": 10**6}, "context"),
        ([1, 2], {"window": 8, "stride": 9}, "stride=9"),
        ([1, 2], {"window": 8, "stride": 0}, "stride=0"),
    ],
)
def test_bad_requests_are_refused(model, ids, options, message):
    with pytest.raises(GenerationError, match=message):
        perplexity(model, ids, **options)


def test_benchmark_counts_what_it_times(model):
    seen = []
    found = benchmark(
        model, prompt_tokens=5, generation_tokens=3, batch_size=2, trials=2,
        progress=lambda *event: seen.append(event),
    )  # fmt: skip
    assert seen == [("bench", i + 1, 3) for i in range(3)]
    assert (found.prompt_tokens, found.generation_tokens, found.batch_size) == (5, 3, 2)
    assert found.prompt_tps > 0 and found.generation_tps > 0 and found.peak_memory > 0
    assert found.floor_share is None or found.floor_share > 0


def test_floor_share_is_least_time_over_time_taken():
    found = BenchResult(1, 2, 4, 1, 1.0, 80.0, 1.0, step_bytes=10_000, bandwidth=1e6)
    # A step of four rows took 4 / 80 s; reading 10 kB takes 0.01 s.
    assert found.floor_share == pytest.approx(0.01 / 0.05)


def test_step_bytes_leave_out_what_a_step_does_not_read(moe):
    config, params = moe.config, moe.params
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    experts = sum(
        layer["mlp"][name]["weight"].nbytes
        for layer in (params["layers_0"], params["layers_1"])
        for name in ("gate_up_proj", "down_proj")
    )
    embedding = params["embed_tokens"]["weight"].nbytes
    rest = moe.nbytes - experts - embedding
    top, count = config.num_experts_per_tok, config.num_experts
    for batch in (1, 3):
        hit = 1 - (1 - top / count) ** batch
        position = 4 * batch  # the cache's own bookkeeping, i32 a row
        wanted = rest + experts * hit + embedding * batch / config.vocab_size + position
        wanted += cache * 10 * batch
        assert decode_step_bytes(moe, batch_size=batch, context=10) == pytest.approx(wanted, abs=1)


def test_read_bandwidth_is_a_positive_rate():
    assert read_bandwidth(nbytes=1 << 20, trials=1) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens=0"),
        ({"generation_tokens": 1}, "generation_tokens=1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"trials": 0}, "trials=0"),
        ({"prompt_tokens": 10**6}, "context"),
    ],
)
def test_bad_benchmarks_are_refused(model, options, message):
    with pytest.raises(GenerationError, match=message):
        benchmark(model, **options)
