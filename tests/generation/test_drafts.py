"""What may draft for which engine, and what is refused."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from drafters import Scripted, Tapped
from generation_toy import make_toy

from fp4jax.errors import ConfigError, EngineMismatchError, GenerationError
from fp4jax.generation import Draft, PromptLookup, generate_tokens, pair_draft
from fp4jax.generation.draft_context import propose_after, read_context
from fp4jax.generation.drafts import as_draft
from fp4jax.generation.sampling_params import SamplingParams
from fp4jax.model import engine_id

PROMPTS = ((5, 9, 20, 3), (7,))


@pytest.fixture(scope="module")
def other():
    return make_toy(seed=1)


@pytest.fixture
def tapped():
    matrix = np.random.default_rng(5).normal(size=(24, 24)).astype(np.float32)
    return Draft(Tapped(4), jnp.asarray(matrix))


@dataclasses.dataclass(frozen=True)
class Loaded:
    """As a loaded checkpoint has it."""

    module: object
    params: object


def test_what_counts_as_a_draft(toy, tapped):
    lookup = as_draft(PromptLookup(), toy)
    assert (lookup.drafter, lookup.params, lookup.engine_id) == (PromptLookup(), None, None)
    loaded = as_draft(Loaded(tapped.drafter, tapped.params), toy)
    assert loaded.drafter is tapped.drafter and loaded.params is tapped.params
    assert as_draft(tapped, toy, 7).drafter == Tapped(8)
    for wrong in (object(), "prompt-lookup", toy):
        with pytest.raises(ConfigError, match="is no drafter"):
            as_draft(wrong, toy)

    class Picky(Scripted):
        def check_fits(self, target):
            raise ConfigError("made for another vocabulary")

    with pytest.raises(ConfigError, match="another vocabulary"):
        generate_tokens(toy, [1, 2], draft=Picky())


def test_a_pair_is_one_engines_alone(toy, other, tapped):
    pair = pair_draft(tapped, toy)
    assert pair.engine_id == engine_id(toy.params)
    found = generate_tokens(toy, PROMPTS[0], draft=pair, max_tokens=9)
    assert found.tokens == generate_tokens(toy, PROMPTS[0], max_tokens=9).tokens
    same = dataclasses.replace(toy, params={k: v + 0 for k, v in toy.params.items()})
    generate_tokens(same, PROMPTS[0], draft=pair, max_tokens=9)  # a copy is the same engine
    ids = f"{engine_id(toy.params)}.*{engine_id(other.params)}"
    with pytest.raises(EngineMismatchError, match=f"was paired with engine {ids}"):
        generate_tokens(other, PROMPTS[0], draft=pair)
    with pytest.raises(EngineMismatchError, match=ids):
        read_context(other, pair, PROMPTS)


def test_a_context_is_one_engines_and_one_drafters_alone(toy, other, tapped):
    """The proposals come from the activations, the embedding and the head of one engine."""
    found = {}
    for name, engine in (("toy", toy), ("other", other)):
        context = read_context(engine, tapped, PROMPTS)
        assert context.engine_id == engine_id(engine.params)
        assert context.anchors.tolist() == [3, 7]
        found[name] = propose_after(engine, tapped, context).tokens
        p = {key: np.asarray(value, np.float64) for key, value in engine.params.items()}
        for b, prompt in enumerate(PROMPTS):
            angles = np.arange(len(prompt) - 1)[:, None] * 0.3 ** np.arange(24)
            seen = (p["embedding"][list(prompt[:-1])] + np.sin(angles)).sum(axis=0)
            hidden = (p["embedding"][prompt[-1]] + seen) @ np.asarray(tapped.params, np.float64)
            best = int(np.argmax(hidden @ p["head"]))
            assert found[name][b].tolist() == [best] * 3
    assert found["toy"].tolist() != found["other"].tolist()
    context = read_context(toy, tapped, PROMPTS)
    ids = f"{engine_id(toy.params)}.*{engine_id(other.params)}"
    with pytest.raises(EngineMismatchError, match=f"the activations of engine {ids}"):
        propose_after(other, tapped, context)
    changed = Draft(tapped.drafter, tapped.params + 1)
    with pytest.raises(EngineMismatchError, match="made by drafter"):
        propose_after(toy, changed, context)
    drawn = propose_after(toy, tapped, context, SamplingParams(temp=1.0, seed=3))
    assert drawn.scores is not None and drawn.scores.shape == (2, 3, 61)
    with pytest.raises(GenerationError, match="prompt 1 is empty"):
        read_context(toy, tapped, [[1], []])
