"""The registry of architectures: one file each, all of them registered and well formed."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import tomllib
from pathlib import Path

import pytest

import fp4jax.models
from fp4jax.architecture import Architecture
from fp4jax.errors import ConfigError
from fp4jax.generation.block_drafter import BlockDrafter
from fp4jax.layers.decoder import DecoderModel
from fp4jax.models import ARCHITECTURES, find_architecture

ROOT = Path(__file__).parents[1]
NAMES = tuple(architecture.name for architecture in ARCHITECTURES)


def test_every_file_is_registered_and_every_name_is_in_one_file():
    declared = []
    for module in pkgutil.iter_modules(fp4jax.models.__path__):
        found = vars(importlib.import_module(f"fp4jax.models.{module.name}"))
        values = [value for value in found.values() if isinstance(value, Architecture)]
        values += [
            item
            for value in found.values()
            if isinstance(value, tuple)
            for item in value
            if isinstance(item, Architecture)
        ]
        assert values, f"models/{module.name}.py declares no architecture"
        declared += values
    assert sorted(a.name for a in declared) == sorted(NAMES)
    assert len(set(NAMES)) == len(NAMES)
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"} <= set(NAMES)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=NAMES)
def test_declarations(architecture):
    kind = BlockDrafter if architecture.drafter else DecoderModel
    assert issubclass(architecture.model, kind)
    assert inspect.getdoc(architecture.model) and inspect.getdoc(architecture.config)
    assert all(skip.reason and skip.pattern for skip in architecture.skip)
    assert hash(architecture) == hash(dataclasses.replace(architecture))
    assert find_architecture([architecture.name]) is architecture
    with pytest.raises(ConfigError, match="is missing"):
        architecture.config({})


def test_the_first_known_name_counts():
    assert find_architecture(["Custom", "Qwen3ForCausalLM"]).name == "Qwen3ForCausalLM"
    for names in ([], ["qwen3forcausallm"], ["Qwen3"]):
        with pytest.raises(ConfigError) as refused:
            find_architecture(names)
        assert all(name in str(refused.value) for name in NAMES)


@pytest.mark.parametrize("name", ["llama-odd-modelopt", "qwen3-ct-nvfp4", "qwen3moe-modelopt"])
def test_key_tables(oracles, name):
    """Targets and sources are each named once, shapes are whole, and the config is a value."""
    hf = json.loads((oracles / name / "config.json").read_text())
    architecture = find_architecture(hf["architectures"])
    config = architecture.config(hf)
    assert config == architecture.config(hf) and hash(config) == hash(architecture.config(hf))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 1
    keys = architecture.keys(config)
    assert keys[0].target == "embed_tokens" and keys[-1].kind == "head"
    targets = [key.target for key in keys]
    sources = [source for key in keys for source in key.sources]
    assert len(set(targets)) == len(targets) and len(set(sources)) == len(sources)
    for key in keys:
        assert all(rows > 0 for rows in key.rows) and len(key.rows) == len(key.sources)
        assert (key.k == 0) == (key.kind == "vector")
        assert ("{expert}" in key.sources[0]) == (key.experts > 0)
        assert key.shard_names == tuple(source.split(".")[-1] for source in key.sources)
    layers = {key.target.split("/")[0] for key in keys if key.target.startswith("layers_")}
    assert len(layers) == config.num_hidden_layers


def test_models_are_installed_inside_the_package_only():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-dir"]["fp4jax.models"] == "models"
    assert "fp4jax.models" in settings["packages"] and "models" not in settings["packages"]
    assert fp4jax.models.__name__ == "fp4jax.models"
    # Every folder of the library is listed.
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "fp4jax").rglob("__init__.py")
    }
    assert folders <= set(settings["packages"])
