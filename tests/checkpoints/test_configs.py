"""What config.json can say wrongly, and what it may leave out."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoint_edits import edited, load, refused

import fp4jax
from fp4jax.checkpoints.hf_config import (
    decoder_fields,
    eos_token_ids,
    read_json,
    sliding_windows,
    text_config,
)
from fp4jax.errors import CheckpointError, ConfigError
from fp4jax.loading import open_checkpoint
from fp4jax.models import ARCHITECTURES
from fp4jax.models.qwen3_moe import qwen3_moe_config

LLAMA, QWEN, MOE = "llama-modelopt", "qwen3-ct-nvfp4a16", "qwen3moe-modelopt"


def setting(name, value):
    return lambda config: config.update({name: value})


def without(name):
    return lambda config: config.pop(name)


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], [], None, "GPT2LMHeadModel"])
def test_an_unknown_architecture_lists_the_known_ones(oracles, tmp_path, names):
    folder = edited(oracles / LLAMA, tmp_path / "e", config=setting("architectures", names))
    known = [architecture.name for architecture in ARCHITECTURES]
    said = "'GPT2LMHeadModel'" if names else "unnamed"
    with refused(ConfigError, str(folder), f"architecture {said} is not supported", *known):
        load(folder)


REQUIRED = ["hidden_size", "num_attention_heads", "vocab_size", "intermediate_size",
            "num_hidden_layers", "max_position_embeddings"]  # fmt: skip


@pytest.mark.parametrize("name", REQUIRED)
def test_a_required_field_that_is_missing(oracles, tmp_path, name):
    folder = edited(oracles / LLAMA, tmp_path / "e", config=without(name))
    with refused(ConfigError, str(folder), "config.json", f"{name!r} is missing"):
        load(folder)


@pytest.mark.parametrize(
    ("source", "name", "value", "says"),
    [
        *((LLAMA, name, value, "positive integer") for name in (*REQUIRED, "head_dim")
          for value in (0, -3, 2.0, "8", True)),
        (LLAMA, "num_key_value_heads", 3, "not a multiple"),
        (LLAMA, "rms_norm_eps", 0, "positive number"),
        (LLAMA, "rms_norm_eps", "1e-6", "positive number"),
        (LLAMA, "hidden_act", "gelu", "known: silu"),
        (LLAMA, "tie_word_embeddings", "no", "true or false"),
        (LLAMA, "attention_bias", 1, "true or false"),
        (LLAMA, "mlp_bias", "yes", "true or false"),
        (LLAMA, "rope_parameters", [1], "must be an object"),
        (LLAMA, "rope_scaling", "linear", "must be an object"),
        (LLAMA, "rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "known: default"),
        (LLAMA, "rope_parameters", {"rope_theta": "big"}, "rope_theta"),
        (LLAMA, "rope_parameters", {"rope_theta": -1.0}, "rope_theta"),
        (LLAMA, "rope_parameters", {"rope_type": "linear"}, "'linear' needs 'factor'"),
        (LLAMA, "rope_parameters", {"rope_type": "linear", "factor": "x"}, "'factor' must be"),
        (LLAMA, "rope_parameters",
         {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4},
         "needs 'original_max_position_embeddings'"),
        (LLAMA, "rope_parameters",
         {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4,
          "original_max_position_embeddings": 64}, "above low_freq_factor"),
        (LLAMA, "rope_parameters", {"full_attention": {"rope_theta": 1e4}}, "full_attention"),
        (QWEN, "use_sliding_window", "yes", "true or false"),
        (MOE, "num_local_experts", 0, "positive integer"),
        (MOE, "num_experts_per_tok", 7, "num_local_experts = 6"),
        (MOE, "norm_topk_prob", "yes", "true or false"),
        (MOE, "mlp_only_layers", 1, "must be a list of int"),
        (MOE, "mlp_only_layers", ["1"], "must be a list of int"),
        (MOE, "decoder_sparse_step", 0, "positive integer"),
        (LLAMA, "eos_token_id", "</s>", "eos_token_id"),
        (LLAMA, "eos_token_id", [2, -1], "eos_token_id"),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_kind(oracles, tmp_path, source, name, value, says):
    folder = edited(oracles / source, tmp_path / "e", config=setting(name, value))
    field = () if "rope" in name else (name,)
    with refused(ConfigError, *field, says):
        load(folder)


@pytest.mark.parametrize(
    ("source", "name", "value", "word"),
    [
        (LLAMA, "hidden_size", 144, "embed_tokens"),
        (LLAMA, "vocab_size", 400, "embed_tokens"),
        (LLAMA, "intermediate_size", 272, "mlp.gate_proj"),
        (LLAMA, "num_attention_heads", 8, "self_attn.q_proj"),
        (LLAMA, "num_key_value_heads", 4, "self_attn.k_proj"),
        (LLAMA, "head_dim", 16, "self_attn.q_proj"),
        (QWEN, "head_dim", 64, "self_attn"),
        (MOE, "moe_intermediate_size", 80, "experts.0.gate_proj"),
        (LLAMA, "num_hidden_layers", 3, "model.layers.2.input_layernorm"),
        (LLAMA, "num_hidden_layers", 1, "belong to no part of the model: model.layers.1"),
        (MOE, "num_local_experts", 8, "mlp.gate.weight has shape [6, 128]"),
        (MOE, "num_local_experts", 5, "call for [5, 128]"),
        (MOE, "mlp_only_layers", [0], "model.layers.0.mlp.gate_proj.weight"),
        (LLAMA, "attention_bias", True, "self_attn.q_proj.bias"),
        (LLAMA, "mlp_bias", True, "mlp.down_proj.bias"),
    ],
)
def test_sizes_that_disagree_with_the_tensors(oracles, tmp_path, source, name, value, word):
    folder = edited(oracles / source, tmp_path / "e", config=setting(name, value))
    with refused(CheckpointError, str(folder), word, "config.json"):
        load(folder)


def test_fields_that_may_be_missing_or_null():
    hf = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 10,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    for nothing in ({}, dict.fromkeys(["head_dim", "num_key_value_heads", "rope_scaling"])):
        fields = decoder_fields({**hf, **nothing})
        assert (fields["head_dim"], fields["num_key_value_heads"]) == (16, 4)
        assert fields["rope"].theta == 10000.0 and fields["rope"].kind == "default"
        assert not (fields["attention_bias"] or fields["tie_word_embeddings"])
    with pytest.raises(ConfigError, match="hidden_size = 62 is not a multiple"):
        decoder_fields({**hf, "hidden_size": 62})


def test_attention_windows_as_transformers_reads_them():
    base = {"num_hidden_layers": 4, "sliding_window": 8}
    on = {**base, "use_sliding_window": True}
    assert sliding_windows(base) == (None,) * 4
    assert sliding_windows({**base, "use_sliding_window": False}) == (None,) * 4
    assert sliding_windows({**on, "max_window_layers": 3}) == (None, None, None, 8)
    assert sliding_windows({**on, "max_window_layers": 28}) == (None,) * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    assert sliding_windows({**on, "layer_types": kinds}) == (8, None, 8, None)
    for types in (kinds[:3], ["sliding_attention", "chunked_attention"] * 2, "full_attention"):
        with pytest.raises(ConfigError, match="layer_types"):
            sliding_windows({**on, "layer_types": types})
    with pytest.raises(ConfigError, match="'sliding_window' is missing"):
        sliding_windows({**on, "sliding_window": None})


def test_which_layers_of_a_qwen3_moe_are_sparse_and_windowed(oracles):
    hf = json.loads((oracles / MOE / "config.json").read_text())
    hf |= {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config = qwen3_moe_config(hf)
    assert config.sparse == (False, True, False, False, False, True)
    assert config.windows == (None,) * 6
    hf |= {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 4}
    assert qwen3_moe_config(hf).windows == (7,) * 6
    hf["num_experts"] = hf.pop("num_local_experts")  # as transformers 4 spells it
    assert qwen3_moe_config(hf).num_experts == 6


def test_end_of_sequence_ids_of_all_configs():
    assert eos_token_ids({"eos_token_id": [7, 2]}, {"eos_token_id": 2}, {}) == (7, 2)
    assert eos_token_ids({"eos_token_id": None}) == ()
    with pytest.raises(ConfigError, match="True"):
        eos_token_ids({"eos_token_id": True})


def test_end_of_sequence_ids_of_a_checkpoint(oracles, tmp_path):
    folder = edited(oracles / LLAMA, tmp_path / "e", config=setting("eos_token_id", [9, 2]))
    generation = json.loads((folder / "generation_config.json").read_text())
    assert load(folder).eos_token_ids == (generation["eos_token_id"], 9)
    (folder / "generation_config.json").unlink()
    assert load(folder).eos_token_ids == (9, 2)


def test_the_text_part_of_a_multimodal_config_comes_first():
    merged = text_config({"vocab_size": 1, "x": 2, "text_config": {"vocab_size": 3}})
    assert (merged["vocab_size"], merged["x"]) == (3, 2)
    assert text_config({"vocab_size": 1, "text_config": None})["vocab_size"] == 1


def test_an_optional_file_that_is_not_there(tmp_path):
    assert read_json(tmp_path / "x.json") == {}


@pytest.mark.parametrize("dtype", ["int8", "float64", "no such dtype", object()])
def test_a_dtype_that_cannot_be(oracles, dtype):
    with refused(ConfigError, "dtype", "bfloat16, float16 or float32"):
        fp4jax.load_model(oracles / LLAMA, dtype=dtype, progress=False)


def test_opening_reads_no_data(oracles):
    opened = open_checkpoint(str(oracles / MOE))
    assert opened.architecture.name == "Qwen3MoeForCausalLM"
    assert opened.quantization.algorithms == ("NVFP4",)
    assert opened.plan.nbytes == sum(
        opened.files.info(t.name).nbytes for node in opened.plan.nodes for t in node.tensors
    )
    experts = [node for node in opened.plan.nodes if node.stacked]
    assert [node.shape for node in experts[:2]] == [(6, 128, 128), (6, 128, 64)]
    assert np.prod(experts[0].shape) * 9 // 16 + 6 * 2 * 4 == experts[0].nbytes
