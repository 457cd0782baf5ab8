"""Every architecture as a target: the same tokens with any draft, states rolled back exactly."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafters import scripted, simulate

import fp4jax
from fp4jax.layers.cache import KVCache, Trial
from fp4jax.models import ARCHITECTURES

ORACLES = Path(__file__).parents[1] / "oracles"
TARGETS = {
    "LlamaForCausalLM": "llama-modelopt",
    "Qwen3ForCausalLM": "qwen3-ct-nvfp4",
    "Qwen3MoeForCausalLM": "qwen3moe-ct",
    "Qwen3_5ForConditionalGeneration": "qwen3_5-ct",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5moe-ct",
    "NemotronHForCausalLM": "nemotronh-mixed",
}
RECURRENT = ("qwen3_5-ct", "nemotronh-mixed")
BLOCK, COUNT, LENGTHS = 5, 22, (9, 1, 14)


@functools.partial(jax.jit, static_argnames=("module", "taps"))
def forward(module, params, tokens, cache, lengths, taps=()):
    return module.apply({"params": params}, tokens, cache, lengths, taps)


@functools.partial(jax.jit, static_argnames="module")
def on_trial(module, params, tokens, cache, lengths):
    """The cache after a pass over all tokens, of which ``lengths`` are kept."""
    out = module.apply({"params": params}, tokens, cache.on_trial(), None)
    return out.cache.commit(cache.position, lengths)


@functools.partial(jax.jit, static_argnames=("module", "index"))
def one_layer(module, params, x, index):
    positions = jnp.tile(jnp.arange(x.shape[1], dtype=jnp.int32), (x.shape[0], 1))

    def run(module):
        return module.layers[index](x, positions, None)[0]

    return module.apply({"params": params}, method=run)


@pytest.fixture(scope="module", params=TARGETS.values())
def model(request):
    return fp4jax.load_model(ORACLES / request.param, dtype="float32", progress=False)


def prompts(model) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, model.config.vocab_size, n).tolist() for n in LENGTHS]


def test_every_architecture_is_a_target():
    assert set(TARGETS) == {a.name for a in ARCHITECTURES if not a.drafter}


def test_greedy_tokens_with_right_wrong_and_mixed_drafts(model):
    rows, options = prompts(model), {"max_tokens": COUNT, "ignore_eos": True, "prefill_chunk": 16}
    plain = fp4jax.batch_generate(model, None, rows, **options)
    wrong = np.zeros((3, COUNT), bool)
    wrong[1] = True
    wrong[2] = np.random.default_rng(1).random(COUNT) < 0.3
    vocab, layers = model.config.vocab_size, model.config.num_hidden_layers
    draft = scripted(rows, plain.tokens, wrong, vocab, BLOCK, taps=(0, layers))
    found = fp4jax.batch_generate(model, None, rows, draft=draft, **options)
    assert found.tokens == plain.tokens
    for b in range(3):
        assert list(found.from_draft[b]) == simulate(wrong[b], COUNT, BLOCK)[1]
        np.testing.assert_allclose(found.logprobs[b], plain.logprobs[b], atol=2e-4)
    # As few passes as the row that is always wrong needs, each row no more than its own.
    steps = sum(sum(simulate(row, COUNT, BLOCK)[0]) for row in wrong)
    assert found.stats.acceptance.steps == steps


def test_taps_are_what_enters_and_leaves_the_layers(model):
    ids = jnp.asarray([prompts(model)[2]] * 2, jnp.int32)
    layers = model.config.num_hidden_layers
    plain = forward(model.module, model.params, ids, None, None)
    assert plain.taps == ()
    out = forward(model.module, model.params, ids, None, None, (layers, 0, layers - 1))
    last, first, before = out.taps
    np.testing.assert_allclose(out.hidden, plain.hidden, rtol=0, atol=1e-5)
    embedded = model.module.apply({"params": model.params}, ids, method="embed")
    np.testing.assert_array_equal(first, embedded)
    scale = float(np.abs(last).max())
    after = one_layer(model.module, model.params, before, layers - 1)
    np.testing.assert_allclose(last, after, rtol=0, atol=1e-5 * scale)


def test_taps_that_nobody_asks_for_are_free(model):
    """The compiled program of a pass without taps is that of one whose taps are dropped."""
    ids = jax.ShapeDtypeStruct((1, 4), jnp.int32)

    def hidden(params, tokens, taps):
        return model.module.apply({"params": params}, tokens, None, None, taps).hidden

    texts = [
        jax.jit(functools.partial(hidden, taps=taps)).lower(model.params, ids).as_text()
        for taps in ((), (0, 1))
    ]
    assert texts[0] == texts[1]
    cache = jax.eval_shape(lambda: model.module.init_cache(1, 8))
    out = jax.eval_shape(
        lambda p, t, c: model.module.apply({"params": p}, t, c), model.params, ids, cache
    )
    assert len(jax.tree.leaves(out)) == 1 + len(jax.tree.leaves(cache))


def seen(cache):
    """The cache without what no query sees: keys and values from a row's position on."""

    def visible(entry):
        if not isinstance(entry, KVCache):
            return entry
        slots = jnp.arange(entry.keys.shape[1], dtype=jnp.int32)
        held = (slots < cache.position[:, None])[:, :, None, None]
        return jax.tree.map(lambda x: jnp.where(held, x, 0.0), entry)

    return dataclasses.replace(cache, layers=tuple(map(visible, cache.layers)))


@pytest.mark.parametrize("name", RECURRENT)
def test_a_rolled_back_cache_is_that_of_the_kept_tokens(name):
    """Bit for bit, for every number of kept tokens, and from a state that is not empty."""
    model = fp4jax.load_model(ORACLES / name, dtype="float32", progress=False)
    module, params, width = model.module, model.params, 7
    rows = width + 1
    rng = np.random.default_rng(2)
    ids = rng.integers(0, model.config.vocab_size, (rows, 12 + width)).astype(np.int32)
    begun = jnp.asarray(rng.integers(0, 13, rows), jnp.int32)
    cache = forward(module, params, ids[:, :12], module.init_cache(rows, 32), begun).cache
    trial = cache.on_trial().layers
    assert any(isinstance(entry, Trial) for entry in trial)
    kept = jnp.arange(rows, dtype=jnp.int32)
    tokens = ids[:, 12:]
    found = on_trial(module, params, tokens, cache, kept)
    wanted = forward(module, params, tokens, cache, kept).cache
    assert found.position.tolist() == (begun + kept).tolist()
    jax.tree.map(np.testing.assert_array_equal, seen(found), seen(wanted))
    # What was refused leaves no trace.
    other = np.where(np.arange(width) < np.asarray(kept)[:, None], tokens, 3)
    again = on_trial(module, params, other, cache, kept)
    jax.tree.map(np.testing.assert_array_equal, seen(found), seen(again))
