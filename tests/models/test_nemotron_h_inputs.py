"""Nemotron-H: what its configuration may say in several ways, and bad input, refused by name."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp4jax.errors import CheckpointError, CheckpointWarning, ConfigError, EngineMismatchError
from fp4jax.layers.cache import Cache, KVCache
from fp4jax.layers.mamba2 import Mamba2Cache
from fp4jax.loading import open_checkpoint
from fp4jax.marlin import MarlinWeight
from fp4jax.models import find_architecture
from fp4jax.models.nemotron_h import ATTENTION, MAMBA, MLP, MOE, nemotron_h_config

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "checkpoints"))

from checkpoint_edits import edited, load, quantize, refused  # noqa: E402

MIXED = TESTS / "oracles" / "nemotronh-mixed"
LAYER = "backbone.layers.0.mixer"


def config(**changes):
    return nemotron_h_config({**json.loads((MIXED / "config.json").read_text()), **changes})


# --- configurations -------------------------------------------------------------------------------


def test_layers_by_a_pattern_or_a_list():
    plain = config()
    kinds = (MAMBA, MOE, MAMBA, ATTENTION, MOE, MAMBA, MOE)
    assert plain.layer_types == kinds
    older = {MAMBA: "mamba", ATTENTION: "attention"}
    nothing = {"hybrid_override_pattern": None}
    for name in ("layers_block_type", "layer_types"):
        assert config(**nothing, **{name: list(kinds)}) == plain
        assert config(**nothing, **{name: [older.get(kind, kind) for kind in kinds]}) == plain
        assert config(**{name: list(kinds)}) == plain
    dense = config(hybrid_override_pattern="M-*", num_hidden_layers=3)
    assert dense.layer_types == (MAMBA, MLP, ATTENTION) and dense.experts is None
    assert config(hybrid_override_pattern="*E*E*E*").mamba is None
    counted = config(num_hidden_layers=None)
    assert counted == plain and counted.num_hidden_layers == 7


def test_fields_by_other_names():
    plain = config()
    for usual, other in (
        ("head_dim", "attention_head_dim"),
        ("layer_norm_epsilon", "rms_norm_eps"),
        ("n_groups", "mamba_n_groups"),
        ("conv_kernel", "mamba_d_conv"),
        ("use_conv_bias", "mamba_conv_bias"),
    ):
        stated = json.loads((MIXED / "config.json").read_text())[usual]
        assert config(**{usual: None, other: stated}) == plain


def test_latent_sizes_groups_and_limits():
    assert config().experts.moe_latent_size is None
    assert config(moe_latent_size=48).experts.moe_latent_size == 48
    routing = config(n_group=3, topk_group=2, routed_scaling_factor=1.5).experts.routing
    assert (routing.groups, routing.top_groups, routing.scale) == (3, 2, 1.5)
    assert config(n_shared_experts=0).experts.shared is None
    for stated in ([0.0, {"__float__": "Infinity"}], [0.0, "inf"], (0, math.inf), None):
        assert config(time_step_limit=stated).mamba.time_step_limit == (0.0, math.inf)
    assert config(time_step_limit=[0.1, 2]).mamba.time_step_limit == (0.1, 2.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hybrid_override_pattern": "MEMXE?E"}, ("hybrid_override_pattern", "['?', 'X']", "M (")),
        ({"hybrid_override_pattern": ["M", "E"]}, ("hybrid_override_pattern", "is no text")),
        ({"hybrid_override_pattern": None}, ("'hybrid_override_pattern' is missing",)),
        (
            {"hybrid_override_pattern": None, "layers_block_type": ["mamba", "hyena"]},
            ("layers_block_type names hyena", "known: attention"),
        ),
        ({"layers_block_type": ["mamba"] * 7}, ("hybrid_override_pattern", "contradicts")),
        ({"num_hidden_layers": 8}, ("num_hidden_layers = 8", "7 layers")),
        ({"n_groups": 3}, ("mamba_num_heads = 4", "n_groups = 3")),
        ({"num_key_value_heads": 3}, ("num_attention_heads = 4", "num_key_value_heads = 3")),
        ({"n_group": 4}, ("n_group = 4", "6 experts")),
        ({"n_group": 2, "topk_group": 3}, ("topk_group = 3",)),
        ({"n_group": 6, "num_experts_per_tok": 2}, ("num_experts_per_tok = 2", "n_group = 6")),
        ({"moe_latent_size": -1}, ("moe_latent_size",)),
        ({"time_step_limit": [2, 1]}, ("time_step_limit",)),
        ({"time_step_limit": [0, "much"]}, ("time_step_limit",)),
        ({"mlp_hidden_act": "silu"}, ("mlp_hidden_act = 'silu'", "relu2")),
        ({"mamba_hidden_act": "gelu"}, ("mamba_hidden_act = 'gelu'", "silu")),
        ({"sliding_window": 512}, ("sliding_window = 512",)),
        ({"ssm_state_size": None}, ("ssm_state_size",)),
        ({"moe_shared_expert_intermediate_size": None}, ("moe_shared_expert_intermediate_size",)),
    ],
)
def test_what_cannot_be_served_is_named(changes, words):
    with pytest.raises(ConfigError) as error:
        config(**changes)
    assert all(word in str(error.value) for word in ("config.json", *words))


@pytest.mark.parametrize("algorithm", ["INT8_SQ", "nvfp4", None])
def test_an_algorithm_that_nobody_knows(tmp_path, algorithm):
    module = "backbone.layers.2.mixer.in_proj"

    def change(stated):
        stated["quantized_layers"][module]["quant_algo"] = algorithm

    folder = edited(MIXED, tmp_path / "e", quant=change)
    with refused(ConfigError, str(folder), f"quantized_layers: {module}", repr(algorithm), "FP8"):
        open_checkpoint(folder)


# --- tensors --------------------------------------------------------------------------------------


def test_each_layer_is_planned_as_it_is_stored():
    """FP8 stays in eight bits, experts and head in four; nothing else is quantized."""
    plan = open_checkpoint(MIXED).plan
    found = {"/".join(node.path): node.format for node in plan.nodes if node.format != "dense"}
    wanted = {"lm_head/weight": "modelopt"}
    for i, kind in enumerate(config().layer_types):
        if kind == MAMBA:
            wanted |= {f"layers_{i}/mixer/{n}/weight": "fp8" for n in ("in_proj", "out_proj")}
        elif kind == MOE:
            names = [f"{part}{n}_proj" for part in ("", "shared_experts/") for n in ("up", "down")]
            wanted |= {f"layers_{i}/mixer/{n}/weight": "modelopt" for n in names}
    assert found == wanted and plan.warnings == ()


def test_scales_of_an_fp8_cache_are_left_out_by_name():
    skipped = {info.name: reason for info, reason in open_checkpoint(MIXED).plan.skipped}
    scales = {name for name in skipped if not name.endswith("input_scale")}
    layer = "backbone.layers.3.mixer"
    assert scales == {f"{layer}.k_proj.k_scale", f"{layer}.v_proj.v_scale"}
    assert all("8-bit KV cache" in skipped[name] for name in scales)


def test_tensors_of_multi_token_prediction_are_left_out(tmp_path):
    extra = {
        f"{prefix}mtp.layers.0.{name}": np.ones(3, np.float32)
        for prefix in ("", "backbone.", "model.")
        for name in ("enorm.weight", "mixer.in_proj.weight")
    }
    folder = edited(MIXED, tmp_path / "e", tensors=lambda t: t.update(extra))
    skipped = {info.name: reason for info, reason in open_checkpoint(folder).plan.skipped}
    assert all("multi-token prediction" in skipped[name] for name in extra)


def in_fp8(name):
    def change(t):
        t[name] = t[name].astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        t[f"{name}_scale"] = np.asarray(1, np.float32)

    return change


def in_nvfp4(name):
    def change(t):
        packed = (*t[name].shape[:-1], t[name].shape[-1] // 2)
        t[name] = np.zeros(packed, np.uint8)

    return change


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.A_log",
        f"{LAYER}.D",
        f"{LAYER}.dt_bias",
        f"{LAYER}.conv1d.weight",
        f"{LAYER}.conv1d.bias",
        f"{LAYER}.norm.weight",
        "backbone.layers.1.mixer.gate.e_score_correction_bias",
        "backbone.norm_f.weight",
    ],
)
def test_what_is_no_linear_must_not_be_quantized(tmp_path, name):
    folder = edited(MIXED, tmp_path / "fp8", tensors=in_fp8(name))
    with refused(CheckpointError, "model.safetensors", f"{name} is float8_e4m3fn", "bfloat16"):
        load(folder)
    folder = edited(MIXED, tmp_path / "nvfp4", tensors=in_nvfp4(name))
    with refused(CheckpointError, "model.safetensors", name, "config.json"):
        load(folder)


def test_a_router_that_is_quantized_against_its_configuration(tmp_path):
    """The tensors decide, and a warning says so."""
    name = "backbone.layers.1.mixer.gate"
    folder = edited(MIXED, tmp_path / "e", tensors=lambda t: quantize(t, name))
    with pytest.warns(CheckpointWarning, match=f"as NVFP4.*{name}"):
        params = load(folder).params
    assert isinstance(params["layers_1"]["mixer"]["gate"]["weight"], MarlinWeight)


# --- caches ---------------------------------------------------------------------------------------


def cache_of(folder: Path, batch: int = 2, slots: int = 16) -> tuple[object, Cache]:
    """A module, and an empty cache of it; no weights."""
    hf = json.loads((folder / "config.json").read_text())
    architecture = find_architecture(hf["architectures"])
    module = architecture.model(config=architecture.config(hf))
    return module, module.init_cache(batch, slots)


@pytest.fixture(scope="module")
def own_module():
    """A module, an empty cache of it, and what calls it, for shapes alone, with another cache."""
    module, own = cache_of(MIXED)
    tokens = jax.ShapeDtypeStruct((2, 3), np.int32)
    shapes = jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]

    def call(cache):
        return jax.eval_shape(
            lambda p, t, c: module.apply({"params": p}, t, c), shapes, tokens, cache
        )

    return module, own, call


def test_a_state_of_another_model(own_module):
    _, own, call = own_module

    def refuse(cache: Cache, *words: str) -> None:
        with pytest.raises(EngineMismatchError) as error:
            call(cache)
        assert all(word in str(error.value) for word in ("NemotronH", *words)), error.value

    _, dense = cache_of(TESTS / "oracles" / "llama-modelopt")
    refuse(dense, "has 7 layers", "the cache has 2", "another model's")
    refuse(Cache(own.position, own.layers[::-1]), "layer 0", "a Mamba2Cache", "nothing")
    attention = own.layers[3]
    other = (attention, *own.layers[1:])
    refuse(Cache(own.position, other), "layer 0", "a Mamba2Cache", "has a KVCache")
    _, more = cache_of(MIXED, batch=3)
    refuse(more, "2 rows", "3 rows")
    wide = Mamba2Cache(own.layers[0].conv, np.zeros((2, 4, 32, 64), np.float32))
    refuse(Cache(own.position, (wide, *own.layers[1:])), "layer 0", "state", "[2, 4, 32,")
    heads = KVCache.zeros(2, 16, 4, 32, np.float32)
    layers = (*own.layers[:3], heads, *own.layers[4:])
    refuse(Cache(own.position, layers), "layer 3", "keys", "[2, 16, 4, 32]")
    on_trial = Cache(own.position, other).on_trial()
    refuse(on_trial, "layer 0", "a Mamba2Cache", "has a KVCache")


def test_its_own_state_by_any_dtype_and_on_trial_is_taken(own_module):
    module, own, call = own_module
    for cache in (own, module.init_cache(2, 5, jnp.bfloat16).on_trial()):
        assert len(call(cache).cache.layers) == 7
