"""Modules are static: a tree from ``init`` and one from a checkpoint are alike, and only trees
hold arrays."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax.layers.decoder import DecoderModel
from fp4jax.loading import open_checkpoint
from fp4jax.marlin import MarlinWeight
from fp4jax.model import forward

TESTS = Path(__file__).parents[1]
QUANTIZED = ["llama-modelopt", "llama-unshared-modelopt", "qwen3-ct-nvfp4", "qwen3-ct-nvfp4a16",
             "qwen3moe-modelopt", "qwen3moe-ct"]  # fmt: skip
PLAIN = ["llama-llama3-bias", "llama-yarn-tied", "qwen3-window", "qwen3moe-sparse"]
TOKENS = jnp.ones((1, 4), jnp.int32)


def load(name: str) -> fp4jax.Model:
    folder = TESTS / ("data/transformers" if name in PLAIN else "oracles") / name
    return fp4jax.load_model(folder, dtype="float32", progress=False)


def is_weight(node) -> bool:
    return isinstance(node, MarlinWeight)


def init_shapes(module: DecoderModel):
    """The tree of ``module.init`` with shapes in place of arrays."""
    return jax.eval_shape(module.init, jax.random.key(0), TOKENS)["params"]


def with_divisors(tree):
    """The same tree as compressed-tensors would store it."""

    def divisor(node):
        return dataclasses.replace(node, global_is_divisor=True) if is_weight(node) else node

    return jax.tree.map(divisor, tree, is_leaf=is_weight)


@pytest.mark.parametrize("name", QUANTIZED + PLAIN)
def test_init_makes_the_tree_that_load_fills(name):
    model = load(name)
    module = model.module
    if name in PLAIN:
        module = dataclasses.replace(module, quantized=False)
    made = init_shapes(module)
    if "-ct" in name:
        made = with_divisors(made)
    # Structures hold the static fields of repacked weights: shards, K, layout, scale's meaning.
    assert jax.tree.structure(made) == jax.tree.structure(model.params)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(made), jax.tree.leaves(model.params), strict=True
    ):
        assert a.shape == b.shape, path
        kinds = (jnp.issubdtype(a.dtype, jnp.floating), jnp.issubdtype(b.dtype, jnp.floating))
        assert a.dtype == b.dtype or kinds == (True, True), path  # stored in 16 bits


def test_the_comparison_sees_a_static_field():
    made = init_shapes(load("llama-modelopt").module)
    assert jax.tree.structure(made) != jax.tree.structure(with_divisors(made))


def test_a_quantized_head_replaces_only_the_head():
    model = load("llama-lmhead-modelopt")
    made = init_shapes(model.module)
    found = {**model.params, "lm_head": made["lm_head"]}
    assert is_weight(model.params["lm_head"]["weight"])
    assert jax.tree.structure(made) == jax.tree.structure(found)


def test_a_fresh_model_runs_and_its_values_are_of_order_one():
    module = load("qwen3-ct-nvfp4").module
    params = jax.jit(module.init)(jax.random.key(1), TOKENS)["params"]
    logits = np.asarray(forward(module, params, jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]], jnp.int32)))
    assert np.isfinite(logits).all()
    assert 0.2 < logits.std() < 5
    other = jax.jit(module.init)(jax.random.key(2), TOKENS)["params"]
    assert fp4jax.engine_id(params) != fp4jax.engine_id(other)


def held_arrays(value, seen: tuple = ()) -> list:
    """Arrays and tracers among the fields of a module and what they lead to."""
    if isinstance(value, (jax.Array, np.ndarray, MarlinWeight)):
        return [value]
    if isinstance(value, (dict, list, tuple)) or hasattr(value, "items"):
        parts = value.values() if hasattr(value, "values") else value
        return [found for part in parts for found in held_arrays(part, seen)]
    if isinstance(value, nn.Module) or dataclasses.is_dataclass(value):
        if any(value is other for other in seen):
            return []
        # A bound module refers to the tree through its scope, for the time of one call.
        fields = {k: v for k, v in vars(value).items() if k not in ("scope", "_state", "parent")}
        return held_arrays(fields, (*seen, value))
    return []


def test_the_search_for_arrays_finds_them():
    class Keeps(nn.Module):
        def setup(self):
            self.table = self.param("table", lambda _: jnp.ones(3))

        def __call__(self):
            found.extend(held_arrays(self))
            return self.table

    found: list = []
    Keeps().init(jax.random.key(0))
    assert len(found) == 1
    assert held_arrays({"a": [np.ones(2)], "b": (3, "x")}) != []


@pytest.mark.parametrize("name", ["llama-lmhead-modelopt", "qwen3moe-modelopt", "qwen3-window"])
def test_no_module_holds_an_array(name):
    model = load(name)
    visited: list[type] = []
    held: list = []

    def look(next_function, args, kwargs, context):
        result = next_function(*args, **kwargs)
        visited.append(type(context.module))
        held.extend(held_arrays(context.module))
        return result

    def run(params, tokens):
        out = model.module.apply({"params": params}, tokens)
        return model.module.apply({"params": params}, out.hidden, method="logits")

    with nn.intercept_methods(look):
        jax.eval_shape(run, model.params, TOKENS)
    names = {kind.__name__ for kind in visited}
    assert {"RMSNorm", "Attention", "FusedLinear", "Linear", "Embedding"} <= names
    assert len(visited) > 20
    assert held == []


@pytest.mark.parametrize("name", ["llama-odd-modelopt", "qwen3moe-ct", "qwen3-window"])
def test_modules_are_values(name):
    """Equal, hashable and small: two engines of one shape share one static argument."""
    first, second = load(name).module, load(name).module
    assert first is not second and first == second and hash(first) == hash(second)
    assert pickle.loads(pickle.dumps(first)) == first
    assert len(pickle.dumps(first)) < 5000
    assert first != dataclasses.replace(first, dtype=jnp.dtype(jnp.bfloat16))
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.config.hidden_size = 3


def test_the_modules_agree_with_the_key_tables():
    """Every node of a fresh tree is the target of one key, and no key has another one."""
    for name in QUANTIZED + PLAIN:
        folder = TESTS / ("data/transformers" if name in PLAIN else "oracles") / name
        opened = open_checkpoint(folder)
        module = opened.architecture.model(config=opened.config, dtype=jnp.dtype(jnp.float32))
        nodes = jax.tree_util.tree_leaves_with_path(init_shapes(module), is_leaf=is_weight)
        made = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in nodes}
        planned = {"/".join(node.path) for node in opened.plan.nodes}
        assert made == planned, name
