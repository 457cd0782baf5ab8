"""Engines from a configuration alone."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

import fp4jax
from fp4jax.checkpoints.random_files import EVERY_LINEAR, RandomFiles
from fp4jax.errors import CheckpointError, ConfigError
from fp4jax.fp8 import FP8Weight
from fp4jax.loading import read_config
from fp4jax.marlin import MarlinWeight
from fp4jax.quantized import is_quantized

KINDS = ("llama-odd-modelopt", "llama-lmhead-modelopt", "qwen3moe-modelopt")


def load(path, seed=0):
    return fp4jax.random_model(path, dtype="float32", progress=False, seed=seed)


def kinds(params) -> dict[str, str]:
    """Path to kind, shape and dtype of every node."""
    found = {}
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        facts = node.static_facts if is_quantized(node) else (node.shape, node.dtype.name)
        found[name] = f"{type(node).__name__ if is_quantized(node) else 'array'} {facts}"
    return found


@pytest.mark.parametrize("name", KINDS)
def test_the_tree_is_the_checkpoints(oracles, name):
    """The same nodes, of the same kinds and sizes, as loading the checkpoint gives."""
    stored = fp4jax.load_model(oracles / name, dtype="float32", progress=False)
    assert kinds(load(oracles / name).params) == kinds(stored.params)


def test_mixed_precision_is_followed(oracles):
    folder = oracles / "qwen3_5moe-modelopt-mixed"
    stored = fp4jax.load_model(folder, dtype="float32", progress=False)
    found, wanted = kinds(load(folder).params), kinds(stored.params)
    assert found.keys() == wanted.keys()
    quantized = {name for name in wanted if not wanted[name].startswith("array")}
    assert {name: found[name] for name in quantized} == {name: wanted[name] for name in quantized}
    assert {FP8Weight.__name__, MarlinWeight.__name__} == {wanted[n].split()[0] for n in quantized}


def test_logits_are_of_a_sane_size(oracles):
    model = load(oracles / "qwen3_5moe-modelopt-mixed" / "config.json")
    spread = np.asarray(model(np.asarray([[3, 1, 4, 1, 5]]))).std(axis=-1)
    assert (spread > 0.3).all() and (spread < 5).all()


def test_seeds(oracles):
    path = oracles / "llama-modelopt"
    first, same, other = (load(path, seed).engine_id for seed in (1, 1, 2))
    assert first == same != other


def test_a_configuration_that_says_nothing_of_quantization(oracles, tmp_path):
    """All linears are NVFP4 but head, routers, and those whose input 16 does not divide."""
    config = json.loads((oracles / "qwen3moe-modelopt" / "config.json").read_text())
    config.pop("quantization_config", None)
    file = tmp_path / "any-name.json"
    file.write_text(json.dumps({**config, "moe_intermediate_size": 40}))
    found = kinds(load(file).params)
    assert found["lm_head/weight"].startswith("array")
    assert found["layers_0/mlp/gate/weight"].startswith("array")
    assert found["layers_0/mlp/down_proj/weight"].startswith("array")
    assert found["layers_0/mlp/gate_up_proj/weight"].startswith("MarlinWeight")
    assert found["layers_0/self_attn/o_proj/weight"].startswith("MarlinWeight")


def test_bad_configurations(tmp_path, oracles):
    with pytest.raises(CheckpointError, match="no such configuration"):
        load(tmp_path / "absent.json")
    shutil.copy(oracles / "llama-modelopt" / "config.json", tmp_path / "config.json")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Nonsense"]}))
    with pytest.raises(ConfigError, match="Nonsense"):
        load(tmp_path)


NVFP4_MATRICES = {
    "llama-3.1-8b": 7 * 32,
    "qwen3-8b": 7 * 36,
    "qwen3-30b-a3b": (4 + 3 * 128) * 48,
    "qwen3.5-35b-a3b": 3 * (256 + 1) * 40 + 1,
    "nemotron-3-nano-30b-a3b": 2 * (128 + 1) * 23 + 1,
}
FP8_MATRICES = {
    "qwen3.5-35b-a3b": 3 * 30 + 4 * 10,
    "nemotron-3-nano-30b-a3b": 2 * 23,
}


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[1] / "bench/configs").iterdir()))
def test_public_configurations_are_planned(file):
    """Every tensor of the benchmarks' configurations has its place; headers only."""
    stated = read_config(file)
    if stated.quantization.method is None:
        stated = dataclasses.replace(stated, quantization=EVERY_LINEAR)
    plan = stated.plan(RandomFiles(file, stated.keys, stated.quantization))
    assert plan.warnings == () and not plan.tied
    formats = Counter(m.format for node in plan.nodes for group in node.matrices for m in group)
    assert formats["modelopt"] == NVFP4_MATRICES[file.stem]
    assert formats["fp8"] == FP8_MATRICES.get(file.stem, 0)
