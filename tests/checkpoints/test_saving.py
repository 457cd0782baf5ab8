"""A tree that is written and loaded again is the same tree, whatever it is made of."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax.checkpoints.saving import save_checkpoint
from fp4jax.errors import CheckpointError, UnsupportedError
from fp4jax.models import find_architecture

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from dflash_cases import config_of


def read_config(oracles: Path, name: str, **changes):
    hf = json.loads((oracles / name / "config.json").read_text())
    del hf["quantization_config"]
    return {**hf, **changes}


def fresh(hf, dtype=jnp.float32):
    """Random parameters of the unquantized model that ``hf`` describes."""
    architecture = find_architecture(hf["architectures"])
    config = architecture.config(hf)
    module = architecture.model(config=config, dtype=jnp.dtype(dtype), quantized=False)
    key = jax.random.key(0)
    if architecture.drafter:
        block = jnp.zeros((1, config.block_size, config.hidden_size), dtype)
        return module.init(key, block, module.init_cache(1, 8, dtype))["params"]
    return module.init(key, jnp.zeros((1, 4), jnp.int32))["params"]


def check_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for path, value in jax.tree_util.tree_leaves_with_path(wanted):
        name = jax.tree_util.keystr(path)
        own = found
        for part in path:
            own = own[part.key]
        np.testing.assert_array_equal(own, value, err_msg=name)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-modelopt", {}),
        ("llama-modelopt", {"tie_word_embeddings": True}),
        ("qwen3-ct-nvfp4", {"attention_bias": True}),
        ("qwen3moe-modelopt", {}),
    ],
)
def test_models(name, changes, oracles, tmp_path):
    hf = read_config(oracles, name, **changes)
    params = fresh(hf)
    folder = save_checkpoint(tmp_path / "saved", hf, params, dtype=jnp.float32)
    assert json.loads((folder / "config.json").read_text()) == hf
    model = fp4jax.load_model(folder, dtype="float32", progress=False)
    assert model.config.tie_word_embeddings == bool(changes.get("tie_word_embeddings"))
    check_same(model.params, params)


@pytest.mark.parametrize("case", ["full", "causal", "second"])
def test_drafters(case, tmp_path):
    hf = config_of(case)
    params = fresh(hf)
    folder = save_checkpoint(tmp_path / "saved", hf, params, dtype=jnp.float32)
    check_same(fp4jax.load_draft(folder, dtype="float32", progress=False).params, params)


def test_sixteen_bits(oracles, tmp_path):
    hf = read_config(oracles, "llama-modelopt")
    params = fresh(hf)
    folder = save_checkpoint(tmp_path / "saved", hf, params)
    rounded = jax.tree.map(lambda value: value.astype(jnp.bfloat16), params)
    check_same(fp4jax.load_model(folder, dtype="bfloat16", progress=False).params, rounded)


def test_what_is_refused(oracles, tmp_path):
    quantized = fp4jax.load_model(oracles / "llama-modelopt", progress=False)
    hf = read_config(oracles, "llama-modelopt")
    with pytest.raises(UnsupportedError, match="layers_0/self_attn/qkv_proj/weight is quantized"):
        save_checkpoint(tmp_path / "saved", hf, quantized.params)
    assert not (tmp_path / "saved").exists()
    with pytest.raises(CheckpointError, match="exists already"):
        save_checkpoint(oracles, hf, fresh(hf))
