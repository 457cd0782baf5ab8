"""No compiled function of a real engine captures its weights (rule ES004, on the jaxprs)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import marlin
from fp4jax.check_engine_state import captured_arrays, check_captured
from fp4jax.errors import EngineStateError
from fp4jax.generation import loop
from fp4jax.generation.samplers import SamplingArrays, SamplingFeatures
from fp4jax.generation.sampling_params import SamplingParams
from fp4jax.generation.state import Limits
from fp4jax.model import forward
from fp4jax.ops.w4a16_grouped_matmul import w4a16_grouped_matmul
from fp4jax.ops.w4a16_matmul import w4a16_matmul

ROWS = (
    SamplingParams(temp=1.0, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, logprobs=2,
                   seed=1, repetition_context_size=3, presence_penalty=0.1, logit_bias={2: 1.0}),
    SamplingParams(),
)  # fmt: skip


@pytest.fixture(
    scope="module", params=["llama-lmhead-modelopt", "qwen3-ct-nvfp4a16", "qwen3moe-modelopt"]
)
def model(request, oracles):
    """Quantized head, tied embedding, experts."""
    return fp4jax.load_model(oracles / request.param, dtype="bfloat16", progress=False)


def test_forward(model):
    check_captured(forward, model.module, model.params, jnp.ones((2, 5), jnp.int32))


@pytest.mark.parametrize("rows", [ROWS[1:], ROWS], ids=["greedy", "sampled"])
def test_a_whole_generation(model, rows):
    features = SamplingFeatures.of(rows)
    batch = len(rows)

    def run(params, tokens, lengths, sampling, limits):
        return loop.complete(
            model.module, params, tokens, lengths, sampling, limits,
            features=features, capacity=16, size=6, dtype=model.dtype, chunk=4,
        )  # fmt: skip

    check_captured(
        run,
        model.params,
        jnp.ones((batch, 8), jnp.int32),
        jnp.full(batch, 8, jnp.int32),
        SamplingArrays.of(rows, features),
        Limits(jnp.full((batch, 1), -1, jnp.int32), jnp.full(batch, 6, jnp.int32)),
    )


def test_calls_from_a_users_own_jit(model):
    """The tree as an argument is the way; the same call over a closure is found and refused."""
    tokens = jnp.ones((1, 3), jnp.int32)

    @jax.jit
    def right(params, tokens):
        return forward(model.module, params, tokens)

    @jax.jit
    def wrong(tokens):  # fp4jax: allow ES004 (what is to be found)
        return model(tokens)

    check_captured(right, model.params, tokens)
    found = captured_arrays(wrong, tokens)
    leaves = {(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(model.params) if leaf.ndim}
    read = {(array.shape, array.dtype) for array in found if array.on_device}
    assert leaves <= read
    with pytest.raises(EngineStateError, match=r"(?s)`wrong` captures.*uint16"):
        check_captured(wrong, tokens)


def test_ops_and_conversions(model):
    nodes = jax.tree.leaves(
        model.params, is_leaf=lambda node: isinstance(node, marlin.MarlinWeight)
    )
    for node in nodes:
        if not isinstance(node, marlin.MarlinWeight):
            continue
        x = jax.ShapeDtypeStruct((4, node.k), jnp.float32)
        if node.stack:
            sizes = jax.ShapeDtypeStruct(node.stack, jnp.int32)
            check_captured(lambda w, x, sizes: w4a16_grouped_matmul(x, w, sizes), node, x, sizes)
        else:
            check_captured(lambda w, x: w4a16_matmul(x, w), node, x)
            check_captured(marlin.take_rows, node, jax.ShapeDtypeStruct((3,), jnp.int32))
        check_captured(marlin.unpack, node)
        weights = marlin.unpack(node)
        check_captured(lambda w: marlin.repack(w), weights if node.shards[1:] else (weights,))


def test_an_identity_does_not_depend_on_where_the_arrays_lie(model):
    copy = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), model.params)
    assert fp4jax.engine_id(copy) == model.engine_id
