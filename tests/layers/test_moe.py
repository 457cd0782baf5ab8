"""Mixture of experts against a loop over tokens in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_references import (
    error,
    mixture,
    random_nvfp4,
    sigmoid_routing,
    softmax,
    squared_relu_mlp,
    swiglu,
    values,
)

from fp4jax.layers.moe import SparseMoE
from fp4jax.layers.routing import SigmoidRouting, route, route_by_sigmoid, sort_by_expert
from fp4jax.marlin import repack
from fp4jax.nvfp4 import NVFP4Weight

HIDDEN, WIDTH, EXPERTS = 64, 32, 6


def member(weight: NVFP4Weight, e: int) -> NVFP4Weight:
    return jax.tree.map(lambda leaf: leaf[e], weight)


def make_experts(rng, stored: str):
    """Tree nodes and float64 matrices [experts, n, k] of gate, up and down."""
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    quantized = [random_nvfp4(rng, n, k, (EXPERTS,)) for n, k in shapes]
    matrices = [values(w) for w in quantized]
    dense = [jnp.asarray(m.astype(np.float32)) for m in matrices]
    gate_up = {
        "fused": lambda: {"weight": repack(quantized[:2])},
        "dense": lambda: {"weight": jnp.concatenate(dense[:2], axis=1)},
        "mixed": lambda: {"gate_proj_weight": repack(quantized[0]), "up_proj_weight": dense[1]},
    }[stored]()
    down = dense[2] if stored == "dense" else repack(quantized[2])
    return {"gate_up_proj": gate_up, "down_proj": {"weight": down}}, matrices


@pytest.mark.parametrize(
    ("stored", "top_k", "normalize"),
    [
        ("fused", 2, True),
        ("fused", 3, False),
        ("dense", 3, True),
        ("dense", 2, False),
        ("mixed", 1, True),
        ("mixed", 6, False),
    ],
)
def test_sparse_moe(stored, top_k, normalize):
    rng = np.random.default_rng(top_k)
    nodes, matrices = make_experts(rng, stored)
    router = rng.normal(size=(EXPERTS, HIDDEN)).astype(np.float32) * np.float32(0.3)
    x = rng.normal(size=(2, 5, HIDDEN)).astype(np.float32)
    params = {**nodes, "gate": {"weight": jnp.asarray(router)}}
    layer = SparseMoE(HIDDEN, WIDTH, EXPERTS, top_k, normalize)
    found = jax.jit(layer.apply)({"params": params}, x)
    expected = mixture(
        x.reshape(-1, HIDDEN).astype(float), router.astype(float), *matrices, top_k, normalize
    )
    assert found.shape == x.shape
    assert error(found.reshape(-1, HIDDEN), expected) < 2e-6


def test_all_tokens_to_one_expert_and_one_token_alone():
    rng = np.random.default_rng(9)
    nodes, matrices = make_experts(rng, "fused")
    router = np.zeros((EXPERTS, HIDDEN), np.float32)
    router[4] = 1.0
    x = np.abs(rng.normal(size=(7, HIDDEN))).astype(np.float32)
    params = {**nodes, "gate": {"weight": jnp.asarray(router)}}
    layer = SparseMoE(HIDDEN, WIDTH, EXPERTS, 1)
    apply = jax.jit(layer.apply)
    found = np.asarray(apply({"params": params}, x))
    expected = mixture(x.astype(float), router.astype(float), *matrices, 1, True)
    assert error(found, expected) < 2e-6
    alone = np.asarray(apply({"params": params}, x[3:4]))
    assert error(alone, expected[3:4]) < 2e-6


def test_shares_are_probabilities_and_their_order_is_by_size():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(40, EXPERTS)).astype(np.float32)
    for normalize in (True, False):
        chosen, shares = route(jnp.asarray(logits), 3, normalize)
        for row, picked, given in zip(logits, np.asarray(chosen), np.asarray(shares), strict=True):
            probabilities = softmax(row.astype(float))
            np.testing.assert_array_equal(picked, np.argsort(-probabilities)[:3])
            kept = probabilities[picked]
            expected = kept / kept.sum() if normalize else kept
            np.testing.assert_allclose(given, expected, rtol=2e-6)
    np.testing.assert_allclose(np.asarray(route(jnp.asarray(logits), 3, True)[1]).sum(-1), 1.0,
                               rtol=1e-6)  # fmt: skip


def test_sorting_by_expert():
    rng = np.random.default_rng(4)
    chosen = rng.integers(0, 5, (17, 2)).astype(np.int32)  # of 6: the last one gets nothing
    order, sizes = sort_by_expert(jnp.asarray(chosen), EXPERTS)
    flat = chosen.reshape(-1)
    np.testing.assert_array_equal(np.asarray(sizes), [(flat == e).sum() for e in range(EXPERTS)])
    assert sorted(np.asarray(order).tolist()) == list(range(34))
    assert (np.diff(flat[np.asarray(order)]) >= 0).all()
    # Stable, so a token's result does not depend on how equal choices happen to be ordered.
    np.testing.assert_array_equal(np.asarray(order), np.argsort(flat, kind="stable"))


@pytest.mark.parametrize(
    ("groups", "top_groups", "top_k", "normalize"),
    [(1, 1, 3, True), (3, 2, 3, True), (2, 1, 2, False), (6, 2, 2, True)],
)
def test_routing_by_sigmoids(groups, top_groups, top_k, normalize):
    """A bias decides who is chosen, and has no part in the shares."""
    rng = np.random.default_rng(groups)
    logits = rng.normal(size=(50, EXPERTS)).astype(np.float32)
    bias = rng.normal(size=EXPERTS).astype(np.float32)
    routing = SigmoidRouting(groups, top_groups, 2.5)
    chosen, shares = route_by_sigmoid(
        jnp.asarray(logits), jnp.asarray(bias), routing, top_k, normalize
    )
    swayed = 0
    for row, picked, given in zip(logits, np.asarray(chosen), np.asarray(shares), strict=True):
        scores = 1 / (1 + np.exp(-row.astype(float)))
        np.testing.assert_array_equal(
            picked, sigmoid_routing(scores, bias, groups, top_groups, top_k)
        )
        kept = scores[picked]
        expected = 2.5 * (kept / kept.sum() if normalize else kept)
        np.testing.assert_allclose(given, expected, rtol=2e-6)
        swayed += set(picked) != set(np.argsort(-scores)[:top_k])
    assert swayed > 10


@pytest.mark.parametrize("latent", [None, 48])
@pytest.mark.parametrize("gated", [False, True])
def test_experts_beside_a_shared_one(latent, gated):
    """Experts with and without gate, reading the input or what a projection makes of it."""
    rng = np.random.default_rng(1)
    width = latent or HIDDEN
    inside = 2 * WIDTH if gated else WIDTH

    def matrix(*shape):
        return (rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)

    first, down = matrix(EXPERTS, inside, width), matrix(EXPERTS, width, WIDTH)
    shared, shared_down = matrix(inside, HIDDEN), matrix(HIDDEN, WIDTH)
    into, back = matrix(width, HIDDEN), matrix(HIDDEN, width)
    router, bias = matrix(EXPERTS, HIDDEN), rng.normal(size=EXPERTS).astype(np.float32)
    name = "gate_up_proj" if gated else "up_proj"
    params = {
        "gate": {"weight": router},
        "choice_bias": bias,
        name: {"weight": first},
        "down_proj": {"weight": down},
        "shared_experts": {name: {"weight": shared}, "down_proj": {"weight": shared_down}},
    }
    if latent:
        params |= {"fc1_latent_proj": {"weight": into}, "fc2_latent_proj": {"weight": back}}
    layer = SparseMoE(
        HIDDEN,
        WIDTH,
        EXPERTS,
        2,
        gated=gated,
        latent_size=latent,
        sigmoid=SigmoidRouting(scale=1.5),
        shared_size=WIDTH,
    )
    x = rng.normal(size=(9, HIDDEN)).astype(np.float32)
    found = jax.jit(layer.apply)({"params": jax.tree.map(jnp.asarray, params)}, x)

    def expert(row, first, down):
        if gated:
            return swiglu(row, first[:WIDTH], first[WIDTH:], down)
        return squared_relu_mlp(row, first, down)

    expected = np.zeros(x.shape)
    for t, row in enumerate(x.astype(float)):
        scores = 1 / (1 + np.exp(-router.astype(float) @ row))
        chosen = sigmoid_routing(scores, bias, 1, 1, 2)
        read = into @ row if latent else row
        y = sum(scores[e] * expert(read, first[e], down[e]) for e in chosen)
        y = 1.5 * y / scores[chosen].sum()
        expected[t] = (back @ y if latent else y) + expert(row, shared, shared_down)
    assert error(found, expected) < 2e-6
