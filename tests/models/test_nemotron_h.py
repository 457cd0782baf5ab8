"""Nemotron-H: against transformers, and the same numbers however a sequence is cut into calls.

The states of Mamba2 are the point: they must see each valid token once, and no padding.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import fp4jax
from fp4jax.layers.cache import KVCache
from fp4jax.layers.linear import Linear
from fp4jax.layers.mamba2 import Mamba2Cache
from fp4jax.layers.routing import route_by_sigmoid
from fp4jax.models.nemotron_h import ATTENTION, MAMBA, MOE

TESTS = Path(__file__).parents[1]
SMALL = TESTS / "data" / "nemotron_h"
REFERENCES = ("latent-grouped", "limits-mlp", "tied-one-head-a-group")
PARITY = 1e-5
"""Of the largest logit, against transformers in f32, however the tokens are fed; 2.1e-6 is
reached."""
ROWS, SLOTS, WIDTH = 3, 96, 16


def load(name: str, dtype: str = "float32") -> tuple[fp4jax.Model, dict[str, np.ndarray]]:
    folder = SMALL / name if name in REFERENCES else TESTS / "oracles" / name
    file = folder / ("reference" if name in REFERENCES else "oracle")
    model = fp4jax.load_model(folder, dtype=dtype, progress=False)
    return model, load_file(file.with_suffix(".safetensors"))


def largest_error(found, expected) -> float:
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())


def test_no_reference_is_missing():
    assert tuple(sorted(p.name for p in SMALL.iterdir() if p.is_dir())) == REFERENCES


@pytest.mark.parametrize("name", REFERENCES)
def test_logits_of_transformers(name):
    """80 tokens: more than one chunk."""
    model, reference = load(name)
    assert largest_error(model(reference["input_ids"]), reference["logits"]) < PARITY


@pytest.mark.parametrize("name", ["limits-mlp", "latent-grouped"])
def test_greedy_tokens_of_transformers(name):
    """After 80 tokens, from the states and from keys and values; ``test_oracles.py`` has more."""
    model, reference = load(name)
    ids, expected = reference["input_ids"], reference["greedy_ids"]
    found = fp4jax.batch_generate(
        model, None, ids.tolist(), max_tokens=expected.shape[1], ignore_eos=True, temp=0.0
    )
    np.testing.assert_array_equal(np.asarray(found.tokens), expected)


# --- one sequence, cut in many ways -------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="module")
def step(module, params, tokens, cache, lengths):
    """Logits of ``tokens`` after what the cache holds, and the advanced cache."""
    out = module.apply({"params": params}, tokens, cache, lengths)
    return module.apply({"params": params}, out.hidden, method="logits"), out.cache


@functools.partial(jax.jit, static_argnames="module")
def trial(module, params, tokens, cache, lengths):
    """The same by a pass over all of ``tokens`` of which ``lengths`` are kept afterwards."""
    out = module.apply({"params": params}, tokens, cache.on_trial())
    logits = module.apply({"params": params}, out.hidden, method="logits")
    return logits, out.cache.commit(cache.position, lengths)


@pytest.fixture(scope="module", params=["limits-mlp", "tied-one-head-a-group"])
def fed(request):
    """A model, ids [3, T], and transformers' logits for them in one go."""
    model, reference = load(request.param)
    rows = np.asarray([0, 1, 0])
    return model, reference["input_ids"][rows, :40], reference["logits"][rows, :40]


def feed(model, ids: np.ndarray, plan: list[list[int]], width: int, by=step):
    """Logits of each row fed ``plan[turn][row]`` tokens a turn, between padding, and the cache."""
    rows, time = ids.shape
    cache = model.module.init_cache(rows, SLOTS)
    found = np.full((rows, time, model.config.vocab_size), np.nan, np.float32)
    at = np.zeros(rows, int)
    for counts in plan:
        counts = np.minimum(counts, time - at)
        piece = np.full((rows, width), 7, np.int32)  # padding is a token like any other
        for b, n in enumerate(counts):
            piece[b, :n] = ids[b, at[b] : at[b] + n]
        lengths = jnp.asarray(counts, jnp.int32)
        logits, after = by(model.module, model.params, piece, cache, lengths)
        logits = np.asarray(logits)  # slicing it as a jax array would compile a program a length
        for b, n in enumerate(counts):
            found[b, at[b] : at[b] + n] = logits[b, :n]
            if n == 0:
                assert_states_equal(cache, after, b)
        at, cache = at + counts, after
    assert cache.position.tolist() == at.tolist()
    return found, cache


def states(cache, row: int) -> list[np.ndarray]:
    layers = [layer for layer in cache.layers if isinstance(layer, Mamba2Cache)]
    assert layers and any(isinstance(layer, KVCache) for layer in cache.layers)
    return [np.asarray(leaf)[row] for layer in layers for leaf in (layer.conv, layer.state)]


def assert_states_equal(one, other, row: int):
    for a, b in zip(states(one, row), states(other, row), strict=True):
        np.testing.assert_array_equal(a, b)


def test_in_one_go_in_chunks_and_token_by_token(fed):
    model, ids, whole = fed
    time = ids.shape[1]
    for size in (time, WIDTH, 1):
        found, _ = feed(model, ids, [[size] * ROWS] * -(-time // size), size)
        assert largest_error(found, whole) < PARITY


TURN = st.lists(st.integers(0, WIDTH), min_size=ROWS, max_size=ROWS)


@settings(deadline=None, max_examples=8)
@given(plan=st.lists(TURN, min_size=1, max_size=3), by=st.sampled_from([step, trial]))
def test_rows_cut_anywhere_and_paused_at_will(fed, plan, by):
    """Rows of a batch advance by numbers of their own, 0 among them, then to the end.

    So they do where a pass ran over more tokens than are kept of it.
    """
    model, ids, whole = fed
    rest = [[WIDTH] * ROWS] * 3
    found, cache = feed(model, ids, plan + rest, WIDTH, by)
    assert largest_error(found, whole) < PARITY
    # The states, too, are those of the plainest way.
    _, plain = feed(model, ids, rest, WIDTH)
    for b in range(ROWS):
        for a, c in zip(states(cache, b), states(plain, b), strict=True):
            np.testing.assert_allclose(a, c, atol=1e-5 * np.abs(c).max())


@settings(deadline=None, max_examples=6)
@given(order=st.permutations(range(ROWS)), lengths=TURN)
def test_rows_do_not_know_each_other(fed, order, lengths):
    model, ids, _ = fed
    order = np.asarray(order)
    first, cache = feed(model, ids, [lengths], WIDTH)
    again, moved = feed(model, ids[order], [np.asarray(lengths)[order]], WIDTH)
    np.testing.assert_array_equal(again, first[order])
    for b, row in enumerate(order):
        for a, c in zip(states(moved, b), states(cache, row), strict=True):
            np.testing.assert_array_equal(a, c)


def test_prompts_of_any_length_are_continued_each_as_if_alone():
    """Bucketed prompts in chunks: in the second, a row of 3 tokens is all padding."""
    model, reference = load("latent-grouped")
    ids, lengths, new = reference["input_ids"], (34, 3, 21), 6
    prompts = [ids[b % 2, b : b + n].tolist() for b, n in enumerate(lengths)]
    batch = fp4jax.batch_generate(
        model, None, prompts, prefill_chunk=16, max_tokens=new, ignore_eos=True, temp=0.0
    )
    contexts = [prompt + list(tokens) for prompt, tokens in zip(prompts, batch.tokens, strict=True)]
    padded = np.asarray([context + [0] * (40 - len(context)) for context in contexts])
    logits = np.asarray(model(padded))
    for b, n in enumerate(lengths):
        expected = logits[b, n - 1 : n - 1 + new].argmax(axis=-1)
        assert expected.tolist() == list(batch.tokens[b])


def test_only_mamba_and_attention_have_a_cache():
    model, _ = load("latent-grouped")
    cache = model.module.init_cache(2, 8, jnp.bfloat16)
    kinds = {MAMBA: Mamba2Cache, ATTENTION: KVCache}
    expected = [kinds.get(kind, type(None)) for kind in model.config.layer_types]
    assert [type(layer) for layer in cache.layers] == expected
    mamba = cache.layers[1]
    assert (mamba.state.dtype, mamba.conv.dtype) == (jnp.float32, jnp.bfloat16)


# --- bf16 ---------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="module")
def routed(module, params, tokens):
    """Logits, and the experts that each layer chose for each token, sorted."""
    out, state = module.apply(
        {"params": params},
        tokens,
        capture_intermediates=lambda m, _: isinstance(m, Linear) and m.name == "gate",
        mutable=["intermediates"],
    )
    experts, chosen = module.config.experts, []
    top = experts.num_experts_per_tok
    for i, kind in enumerate(module.config.layer_types):
        if kind == MOE:
            (gate,) = jax.tree.leaves(state["intermediates"][f"layers_{i}"])
            bias = params[f"layers_{i}"]["mixer"]["choice_bias"]
            found, _ = route_by_sigmoid(gate, bias, experts.routing, top, True)
            chosen.append(jnp.sort(found.reshape(*tokens.shape, top), axis=-1))
    return module.apply({"params": params}, out.hidden, method="logits"), jnp.stack(chosen)


def frobenius(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("name", "theirs"), [("nemotronh-mixed", 0.0142), ("nemotronh-super", 0.0133)]
)
def test_bf16_is_as_accurate_as_transformers(name, theirs):
    """``theirs``: error of the median position of transformers 5.25 in bf16.

    Ours are 0.0104 and 0.0090. Random routers put some tokens between two experts: bf16 sends 0
    and 2 of the 48 tokens elsewhere than f32 does, which then get another function's value, as do
    the tokens after them (0.123 over all tokens of the second, where transformers has 0.111). So
    the others are held to what dense models reach.
    """
    model, oracle = load(name, "bfloat16")
    exact, _ = load(name)
    ids, expected = oracle["input_ids"], oracle["logits"]
    logits, chosen = routed(model.module, model.params, ids)
    _, chosen_f32 = routed(exact.module, exact.params, ids)
    logits, same = np.asarray(logits), np.asarray(chosen == chosen_f32).all(axis=(0, -1))
    clean = np.logical_and.accumulate(same, axis=1)
    assert (~same).sum() <= 4
    assert clean.mean() > 0.5
    assert frobenius(logits[clean], expected[clean]) < 0.025
    assert frobenius(logits, expected) < 0.15
    error = np.linalg.norm(logits - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert np.median(error) < theirs
