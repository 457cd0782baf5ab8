"""What Qwen3.5 checkpoints hold and say: names, dtypes, stacked experts, parts not served."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp4jax.checkpoints.writer import quantize_checkpoint
from fp4jax.errors import CheckpointError, ConfigError
from fp4jax.loading import open_checkpoint
from fp4jax.marlin import MarlinWeight, dequantize_repacked
from fp4jax.models import find_architecture

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "checkpoints"))

from checkpoint_edits import edited, load, refused  # noqa: E402

DENSE, MOE = "qwen3_5-ct-linattn", "qwen3_5moe-modelopt-nvfp4"
STACKED = TESTS / "data" / "transformers_hybrid" / "qwen3_5moe-stacked"
BF16 = ml_dtypes.bfloat16
IDS = np.asarray([[3, 14, 59, 26, 5, 35, 89, 79]])


def renamed(pattern, replacement):
    def change(tensors):
        for name in list(tensors):
            tensors[re.sub(pattern, replacement, name)] = tensors.pop(name)

    return change


def test_vision_and_draft_tensors_are_left_out_for_a_reason(oracles, tmp_path):
    def tensors(values):
        values["mtp.fc.weight"] = np.zeros((128, 256), BF16)
        values["mtp.layers.0.mlp.experts.0.up_proj.weight"] = np.zeros((4, 4), BF16)

    folder = edited(oracles / "qwen3_5-ct", tmp_path / "e", tensors=tensors)
    reasons = {info.name: why for info, why in open_checkpoint(folder).plan.skipped}
    assert "draft" in reasons["mtp.fc.weight"]
    assert "draft" in reasons["mtp.layers.0.mlp.experts.0.up_proj.weight"]
    seen = {name for name, why in reasons.items() if "vision" in why}
    assert seen == {name for name in reasons if name.startswith("model.visual.")} and len(seen) > 9


def test_a_tensor_of_neither_is_still_refused(oracles, tmp_path):
    name = "model.layers.0.linear_attn.conv1d.bias"
    extra = {name: np.zeros(256, BF16)}
    folder = edited(oracles / DENSE, tmp_path / "e", tensors=lambda t: t.update(extra))
    with refused(CheckpointError, name, "belong to no part"):
        load(folder)


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "conv1d.weight"])
def test_a_parameter_that_is_missing_or_of_another_size(oracles, tmp_path, name):
    full = f"model.layers.1.linear_attn.{name}"
    missing = edited(oracles / DENSE, tmp_path / "m", tensors=lambda t: t.pop(full))
    with refused(CheckpointError, full, "missing"):
        load(missing)
    short = edited(oracles / DENSE, tmp_path / "s", tensors=lambda t: t.update({full: t[full][1:]}))
    with refused(CheckpointError, full, "shape"):
        load(short)


@pytest.mark.parametrize("nested", [False, True])
def test_every_prefix_and_both_architecture_names_are_the_same_engine(oracles, tmp_path, nested):
    """A text model's own checkpoint, as part of a multimodal one."""

    def config(stated):
        kind = stated["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
        stated["architectures"] = [kind]
        if nested:
            own = ("architectures", "quantization_config", "transformers_version")
            text = {key: stated.pop(key) for key in list(stated) if key not in own}
            stated["text_config"] = text

    change = renamed(r"^model\.", "model.language_model.")
    folder = edited(oracles / DENSE, tmp_path / "e", tensors=change, config=config)
    first, second = load(oracles / DENSE), load(folder)
    assert first.module == second.module and first.engine_id == second.engine_id


def test_f32_parameters_stay_f32_in_a_bf16_model(oracles, tmp_path):
    """Decays of 0.999 a token are 1 in bf16; ModelOpt stores these in f32 for that."""

    def tensors(values):
        for name in values:
            if name.endswith(("A_log", "dt_bias")):
                values[name] = values[name].astype(np.float32) + np.float32(1e-3)

    model = load(edited(oracles / DENSE, tmp_path / "e", tensors=tensors), "bfloat16")
    layer = model.params["layers_0"]["linear_attn"]
    assert (layer["A_log"].dtype, layer["dt_bias"].dtype) == (jnp.float32, jnp.float32)
    assert layer["conv1d"].dtype == layer["norm"]["weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize("source", [DENSE, MOE, "qwen3_5-ct"])
def test_init_makes_the_tree_that_load_fills(oracles, source):
    """As far as shapes go; formats of the linear attention differ from file to file."""
    model = load(oracles / source)
    init = jax.eval_shape(model.module.init, jax.random.key(0), jnp.ones((1, 4), jnp.int32))

    def shapes(tree):
        found = jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=lambda node: isinstance(node, MarlinWeight)
        )
        return {
            jax.tree_util.keystr(path): (*node.stack, node.n, node.k)
            if isinstance(node, MarlinWeight)
            else node.shape
            for path, node in found
        }

    assert shapes(model.params) == shapes(init["params"])


# --- experts ------------------------------------------------------------------------------------


def unstack(tensors):
    """Experts one by one, as quantizing tools name them."""
    for name in [name for name in tensors if ".experts." in name]:
        value, parent = tensors.pop(name), name.rpartition(".")[0]
        for e in range(len(value)):
            if name.endswith("down_proj"):
                tensors[f"{parent}.{e}.down_proj.weight"] = value[e]
            else:
                gate, up = np.split(value[e], 2)
                tensors[f"{parent}.{e}.gate_proj.weight"] = gate
                tensors[f"{parent}.{e}.up_proj.weight"] = up


def test_stacked_experts_are_the_same_engine_as_single_ones(tmp_path):
    folder = edited(STACKED, tmp_path / "e", tensors=unstack)
    first, second = load(STACKED), load(folder)
    assert first.module == second.module and first.engine_id == second.engine_id


def test_stacked_experts_of_other_sizes_are_refused(tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    folder = edited(STACKED, tmp_path / "e", tensors=lambda t: t.update({name: t[name][:, :60]}))
    with refused(CheckpointError, "experts.0.down_proj", "[60, 16]", "[64, 16]"):
        load(folder)


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_stacked_experts_are_quantized_one_by_one(tmp_path, form):
    source = load(STACKED)
    model = load(quantize_checkpoint(STACKED, tmp_path / "q", format=form))
    layer, exact = (m.params["layers_0"] for m in (model, source))
    for name in ("gate_up_proj", "down_proj"):
        found = layer["mlp"]["routed"][name]["weight"]
        expected = np.asarray(exact["mlp"]["routed"][name]["weight"], np.float32)
        assert found.shape == expected.shape and found.stack == (5,)
        error = np.asarray(dequantize_repacked(found)) - expected
        assert 0.05 < np.linalg.norm(error) / np.linalg.norm(expected) < 0.12  # that of 4 bits
    assert isinstance(layer["linear_attn"]["in_proj_qkvz"]["weight"], MarlinWeight)
    for kept in (layer["linear_attn"]["in_proj_ba"], layer["mlp"]["shared_expert_gate"]):
        assert isinstance(kept["weight"], jax.Array)


# --- config.json --------------------------------------------------------------------------------


def config_of(oracles, name, **changes):
    hf = json.loads((oracles / name / "config.json").read_text())
    hf = {key: value for key, value in {**hf, **changes}.items() if value is not None}
    return find_architecture(hf["architectures"]).config(hf)


def test_layers_and_rotary_channels_are_found_wherever_they_are_said(oracles):
    stated = config_of(oracles, DENSE)
    assert stated.layer_types == 3 * ("linear_attention",) + ("full_attention",)
    assert (stated.rotary_dim, stated.rope.theta) == (8, 1e6)
    assert config_of(oracles, DENSE, layer_types=None) == stated
    every = config_of(oracles, DENSE, layer_types=None, full_attention_interval=2)
    assert every.layer_types == 2 * ("linear_attention", "full_attention")
    old = {"rope_parameters": None, "rope_theta": 1e6}
    assert config_of(oracles, DENSE, partial_rotary_factor=0.25, **old) == stated
    assert config_of(oracles, DENSE, partial_rotary_factor=None, **old) == stated
    assert config_of(oracles, DENSE, partial_rotary_factor=0.5, **old).rotary_dim == 16
    inside = {"rope_theta": 1e6, "partial_rotary_factor": 0.75}
    assert config_of(oracles, DENSE, rope_parameters=inside).rotary_dim == 24


@pytest.mark.parametrize(
    ("source", "name", "value", "says"),
    [
        (DENSE, "layer_types", ["linear_attention"] * 3, "must be 4 of"),
        (DENSE, "layer_types", ["linear_attention"] * 3 + ["mamba"], "'mamba'"),
        (DENSE, "linear_num_value_heads", 3, "not a multiple of linear_num_key_heads = 2"),
        (DENSE, "linear_conv_kernel_dim", 0, "positive integer"),
        (DENSE, "linear_key_head_dim", "32", "positive integer"),
        (DENSE, "rope_parameters", {"partial_rotary_factor": 0.1}, "even number of channels"),
        (DENSE, "rope_parameters", {"partial_rotary_factor": 1.5}, "even number of channels"),
        (DENSE, "attn_output_gate", 1, "true or false"),
        (MOE, "num_experts_per_tok", 7, "more than num_experts = 6"),
        (MOE, "shared_expert_intermediate_size", None, "is missing"),
        (MOE, "moe_intermediate_size", -1, "positive integer"),
    ],
)
def test_what_cannot_be_is_refused(oracles, source, name, value, says):
    with pytest.raises(ConfigError, match=says):
        config_of(oracles, source, **{name: value})


def test_attention_without_a_gate(oracles, tmp_path):
    """A config may say so; then ``q_proj`` is not doubled."""

    def tensors(values):
        module = "model.layers.3.self_attn.q_proj"
        for leaf in ("weight_packed", "weight_scale"):
            heads = values[f"{module}.{leaf}"].reshape(4, 2, 32, -1)
            values[f"{module}.{leaf}"] = np.ascontiguousarray(heads[:, 0].reshape(128, -1))

    folder = edited(
        oracles / DENSE,
        tmp_path / "e",
        tensors=tensors,
        config=lambda c: c.update(attn_output_gate=False),
    )
    model = load(folder)
    assert model.params["layers_3"]["self_attn"]["qkv_proj"]["weight"].shards == (128, 64, 64)
    plain = np.asarray(model(IDS))
    assert np.isfinite(plain).all()
    assert np.abs(plain - np.asarray(load(oracles / DENSE)(IDS))).max() > 0.1
