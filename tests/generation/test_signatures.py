"""The written shapes and dtypes hold on every call of the numeric functions.

Functions are wrapped one by one: an import hook would also check the constructors of the pytree
dataclasses, which JAX calls with placeholders.
"""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import pytest
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from fp4jax.generation import loop, samplers, state, truncation
from fp4jax.generation.samplers import SamplingArrays, SamplingFeatures
from fp4jax.generation.sampling_params import SamplingParams
from fp4jax.generation.state import Limits


@pytest.fixture
def checked(monkeypatch):
    """Every function of the numeric modules, imported names included, with checks around it."""
    names = []
    for module in (loop, samplers, state, truncation):
        for name, found in list(vars(module).items()):
            if inspect.isfunction(found) and found.__module__.startswith("fp4jax.generation"):
                monkeypatch.setattr(module, name, jaxtyped(found, typechecker=beartype))
                names.append(name)
    return names


def test_signatures_hold_through_a_whole_generation(toy, checked):
    assert {"complete", "decode_step", "sample", "truncate", "_bisect", "record"} <= set(checked)
    rows = [
        SamplingParams(
            temp=1.0, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, logprobs=2, seed=1,
            repetition_context_size=3, presence_penalty=0.1, logit_bias={2: 1.0},
        ),
        SamplingParams(),
    ]  # fmt: skip
    features = SamplingFeatures.of(rows)
    limits = Limits(jnp.full((2, 1), -1, jnp.int32), jnp.asarray([4, 6], jnp.int32))
    tokens, lengths = jnp.ones((2, 8), jnp.int32), jnp.asarray([8, 3], jnp.int32)

    @jax.jit
    def run(params, tokens, lengths, sampling, limits):
        return loop.complete(
            toy.module, params, tokens, lengths, sampling, limits,
            features=features, capacity=16, size=6, dtype=jnp.float32, chunk=4,
        )  # fmt: skip

    out = run(toy.params, tokens, lengths, SamplingArrays.of(rows, features), limits)
    assert out.count.tolist() == [4, 6]
    assert out.top_tokens.shape == (2, 6, 2)


def test_the_checks_are_live(checked):
    features = SamplingFeatures()
    arrays = SamplingArrays.of([SamplingParams()], features)
    nothing = jnp.zeros((1, 0), jnp.int32)
    begun = samplers.init_sampler(arrays, features, nothing, jnp.ones(1, jnp.int32), 5)
    samplers.sample(jnp.zeros((1, 5)), arrays, begun, features)
    for logits in (jnp.zeros(5), jnp.zeros((1, 5), jnp.bfloat16)):
        with pytest.raises(TypeCheckError):
            samplers.sample(logits, arrays, begun, features)
    with pytest.raises(TypeCheckError):
        truncation.temper(jnp.zeros((2, 5)), jnp.ones(3))
