"""What checkpoints say about their quantization: patterns, algorithms, and contradictions."""

from __future__ import annotations

import json
import warnings

import ml_dtypes
import numpy as np
import pytest
from checkpoint_edits import edited, load, refused, unquantize

from fp4jax.checkpoints.quantization import QuantizationConfig, matches, read_quantization
from fp4jax.errors import CheckpointWarning, ConfigError
from fp4jax.fp8 import FP8Weight

MODELOPT, CT = "llama-modelopt", "qwen3-ct-nvfp4"
LAYER = "model.layers.11.self_attn.q_proj"


@pytest.mark.parametrize(
    ("module", "pattern", "expected"),
    [
        (LAYER, LAYER, True),
        (LAYER, "model.layers.1", False),
        (LAYER, "model.layers.1*", True),  # a wildcard, as the tools read it
        (LAYER, "model.layers.11", True),
        (LAYER, "model.layers.11.", True),
        (LAYER, "model.layers.11.self_attn", True),
        (LAYER, "model.layers.11.self", False),
        (LAYER, "q_proj", False),
        (LAYER, "*.q_proj", True),
        (LAYER, "*self_attn*", True),
        (LAYER, "*.[kv]_proj", False),
        (LAYER, "*.[qk]_proj", True),
        (LAYER, "*.layers.??.*", True),
        (LAYER, "re:.*q_proj$", True),
        (LAYER, "re:.*q_pro$", False),
        (LAYER, "re:q_proj", False),  # anchored at the start
        (LAYER, r"re:model\.layers\.(1|11)\.", True),
        (LAYER, "re:.*(mlp|lm_head).*", False),
        (LAYER, "Linear", True),
        ("lm_head", "Linear", True),
        ("model.embed_tokens", "Linear", False),
        ("lm_head", "lm_head", True),
        ("lm_head", "*lm_head*", True),
        ("lm_head", "re:.*lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("language_model.lm_head", "lm_head", True),
        ("lm_head", "head", False),
        # The same module by other prefixes, in both directions.
        (LAYER, LAYER.replace("model.", "model.language_model."), True),
        (LAYER.replace("model.", "model.language_model."), LAYER, True),
        (LAYER.replace("model.", "language_model.model."), LAYER, True),
        (LAYER, "model.language_model.layers.11*", True),
        (LAYER, "layers.11.self_attn.q_proj", True),
        (LAYER, "re:^model.language_model.*q_proj$", True),
        (LAYER, "backbone.layers.11", True),
        ("model.layers.3.mlp.experts.7.up_proj", "model.layers.3.mlp.experts", True),
        ("model.layers.3.mlp.experts.7.up_proj", "model.layers.3.mlp.experts.7", True),
        ("model.layers.3.mlp.experts.77.up_proj", "model.layers.3.mlp.experts.7", False),
        ("model.layers.3.mlp.gate", "re:.*mlp.gate$", True),
        ("model.layers.3.mlp.gate_proj", "re:.*mlp.gate$", False),
    ],
)
def test_patterns(module, pattern, expected):
    assert matches(module, (pattern,)) is expected
    assert matches(module, ("no.such", pattern, "*.nor_this")) is expected


def test_no_patterns_match_nothing():
    assert not matches(LAYER, ())


def test_a_pattern_that_is_no_expression():
    with pytest.raises(ConfigError, match=r"'re:\(' is not valid"):
        matches(LAYER, ("re:(",))


def algorithm(stated: QuantizationConfig, module: str) -> str | None:
    (found,) = stated.algorithms_of([module])
    return found


def test_targets_and_exclusions():
    targets = (("model.layers.11", "NVFP4"), ("re:.*12.*q_proj", "FP8"), ("*.12.*", "NVFP4"))
    stated = QuantizationConfig("modelopt", ("NVFP4", "FP8"), ("*.k_proj",), targets)
    assert algorithm(stated, LAYER) == "NVFP4"
    assert algorithm(stated, LAYER.replace("q_proj", "k_proj")) is None
    assert algorithm(stated, LAYER.replace("11", "12")) == "FP8"
    assert algorithm(stated, LAYER.replace("11", "12").replace("q_proj", "o_proj")) == "NVFP4"
    assert algorithm(stated, LAYER.replace("11", "13")) is None
    assert algorithm(QuantizationConfig("modelopt", ("NVFP4",)), LAYER) == "NVFP4"
    assert algorithm(QuantizationConfig(), LAYER) is None


@pytest.mark.parametrize(
    ("source", "field", "value", "words"),
    [
        (MODELOPT, "quant_algo", "INT4_AWQ", ["hf_quant_config.json", "'INT4_AWQ'", "W4A16_NVFP4"]),
        (MODELOPT, "quant_algo", "FP8_PB_WO", ["'FP8_PB_WO'", "NVFP4"]),
        (MODELOPT, "quant_algo", "NVFP4_AWQ", ["'NVFP4_AWQ'", "NVFP4"]),
        (MODELOPT, "quant_algo", None, ["None", "NVFP4"]),
        (MODELOPT, "group_size", 32, ["group_size 32", "16"]),
        (MODELOPT, "exclude_modules", "lm_head", ["'exclude_modules' must be a list"]),
        (MODELOPT, "exclude_modules", [1], ["'exclude_modules' must be a list"]),
        (CT, "quant_method", "gptq", ["'gptq'", "known: modelopt, compressed-tensors"]),
        (CT, "quant_method", None, ["None", "known: modelopt, compressed-tensors"]),
        (CT, "ignore", "lm_head", ["'ignore' must be a list"]),
        (CT, "config_groups", ["group_0"], ["'config_groups' must be an object"]),
        (CT, "config_groups", {"group_0": 4}, ["'group_0' must be an object"]),
    ],
)
def test_unknown_algorithms_and_malformed_statements(
    oracles, tmp_path, source, field, value, words
):
    folder = edited(
        oracles / source, tmp_path / "e", quant=lambda stated: stated.update({field: value})
    )
    with refused(ConfigError, str(folder), *words):
        load(folder)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_bits", 8, ["8 float bits", "not NVFP4"]),
        ("type", "int", ["4 int bits", "NVFP4"]),
        ("group_size", 32, ["groups of 32", "groups of 16"]),
    ],
)
def test_other_compressed_tensors_schemes(oracles, tmp_path, field, value, words):
    def change(stated):
        stated["config_groups"]["group_0"]["weights"][field] = value

    folder = edited(oracles / CT, tmp_path / "e", quant=change)
    with refused(ConfigError, "group_0", *words):
        load(folder)


@pytest.mark.parametrize("where", ["group", "top"])
def test_another_compressed_tensors_packing(oracles, tmp_path, where):
    def change(stated):
        group = stated["config_groups"]["group_0"]
        if where == "group":
            group["format"] = "int-quantized"
        else:
            del group["format"]
            stated["format"] = "mxfp4-pack-quantized"

    folder = edited(oracles / CT, tmp_path / "e", quant=change)
    with refused(ConfigError, "group_0", "is not supported", "nvfp4-pack-quantized"):
        load(folder)


def test_hf_quant_config_without_a_statement(oracles, tmp_path):
    folder = edited(oracles / MODELOPT, tmp_path / "e")
    (folder / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}}')
    with refused(ConfigError, "hf_quant_config.json", "no 'quantization' object"):
        load(folder)


def test_the_statement_in_config_json_says_the_same_as_the_file(oracles, tmp_path):
    for name in ("llama-modelopt", "llama-odd-modelopt", "qwen3moe-modelopt"):
        root = oracles / name
        config = json.loads((root / "config.json").read_text())
        assert read_quantization(root, config) == read_quantization(tmp_path, config)
    assert read_quantization(tmp_path, {}) == QuantizationConfig()
    with pytest.raises(ConfigError, match="'quantization_config' must be an object"):
        read_quantization(tmp_path, {"quantization_config": 3})


def mixed_layers() -> dict:
    return {
        "model.layers.0": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.mlp": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    }


def test_mixed_precision_lists_an_algorithm_a_layer(oracles, tmp_path):
    def mixed(stated):
        stated.clear()
        stated.update(quant_algo="MIXED_PRECISION", quantized_layers=mixed_layers())

    folder = edited(oracles / MODELOPT, tmp_path / "e", quant=mixed)
    with pytest.warns(CheckpointWarning, match=r"4 modules are stored as NVFP4.*layers\.1\.self"):
        load(folder)
    stated = read_quantization(folder, {})
    assert stated.algorithms == ("NVFP4", "W4A16_NVFP4")
    assert algorithm(stated, "model.layers.0.mlp.up_proj") == "NVFP4"
    assert algorithm(stated, "model.layers.1.mlp.up_proj") == "W4A16_NVFP4"
    assert algorithm(stated, "model.layers.1.self_attn.q_proj") is None


def test_mixed_precision_with_an_unknown_algorithm_names_the_layer(oracles, tmp_path):
    def mixed(stated):
        stated.clear()
        layers = mixed_layers() | {"lm_head": {"quant_algo": "INT8_SQ"}}
        stated.update(quant_algo="MIXED_PRECISION", quantized_layers=layers)

    folder = edited(oracles / MODELOPT, tmp_path / "e", quant=mixed)
    with refused(ConfigError, "quantized_layers: lm_head", "'INT8_SQ'", "MIXED_PRECISION of these"):
        load(folder)


def test_mixed_precision_as_groups_in_config_json(oracles, tmp_path):
    config = json.loads((oracles / MODELOPT / "config.json").read_text())
    stated = config["quantization_config"]
    group = stated["config_groups"]["group_0"] | {"targets": ["model.layers.0", "lm_head"]}
    stated |= {"quant_algo": "MIXED_PRECISION", "config_groups": {"group_0": group}}
    found = read_quantization(tmp_path, config)
    assert found.algorithms == ("NVFP4",)
    assert found.targets == (("model.layers.0", "NVFP4"), ("lm_head", "NVFP4"))

    weights = {"dynamic": False, "num_bits": 8, "type": "float"}
    stated["config_groups"]["group_1"] = {"weights": weights, "targets": ["x"]}
    found = read_quantization(tmp_path, config)
    assert found.algorithms == ("NVFP4", "FP8") and found.targets[2:] == (("x", "FP8"),)
    weights["type"] = "int"
    with pytest.raises(ConfigError, match="group_1: quant_algo 'int 8 bit'"):
        read_quantization(tmp_path, config)
    stated["config_groups"] = {}
    with pytest.raises(ConfigError, match="neither quantized_layers nor config_groups"):
        read_quantization(tmp_path, config)


EXCLUDED = ("lm_head", "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.gate_proj")


@pytest.mark.parametrize(
    "patterns",
    [
        list(EXCLUDED),
        [name.replace("model.", "model.language_model.") for name in EXCLUDED],
        ["lm_head", "*layers.0*v_proj", "*.1.mlp.gate*"],
        ["re:.*lm_head", r"re:.*\.0\.self_attn\.v_proj$", r"re:model\.layers\.1\.mlp\.gate"],
    ],
    ids=["names", "multimodal", "wildcards", "expressions"],
)
def test_exclusions_that_the_tensors_bear_out_raise_no_warning(oracles, tmp_path, patterns):
    def tensors(t):
        for module in EXCLUDED[1:]:
            unquantize(t, module, ml_dtypes.bfloat16)

    folder = edited(
        oracles / MODELOPT,
        tmp_path / "e",
        tensors=tensors,
        quant=lambda stated: stated.update(exclude_modules=patterns),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(folder)


@pytest.mark.parametrize("source", [MODELOPT, CT])
def test_where_config_and_tensors_contradict_each_other_the_tensors_decide(
    oracles, tmp_path, source
):
    field = "exclude_modules" if source == MODELOPT else "ignore"
    wrong = ["model.embed_tokens", "*.layers.1.self_attn.*"]  # not the head, which is unquantized
    folder = edited(
        oracles / source, tmp_path / "e", quant=lambda stated: stated.update({field: wrong})
    )
    with pytest.warns(CheckpointWarning) as caught:
        found = load(folder)
    messages = sorted(str(warning.message) for warning in caught)
    assert len(messages) == 2
    assert "1 modules are stored unquantized, whatever the config says: lm_head" in messages[0]
    assert "4 modules are stored as NVFP4" in messages[1]
    assert "model.layers.1.self_attn.q_proj" in messages[1] and str(folder) in messages[1]
    assert caught[0].filename == load.__code__.co_filename  # points at the caller of load_model
    assert found.engine_id == load(oracles / source).engine_id


def test_quantized_tensors_without_any_statement_load_with_a_warning(oracles, tmp_path):
    folder = edited(
        oracles / CT, tmp_path / "e", config=lambda config: config.pop("quantization_config")
    )
    with pytest.warns(CheckpointWarning, match="14 modules are stored as NVFP4"):
        assert load(folder).engine_id == load(oracles / CT).engine_id


def test_tensors_in_another_format_than_stated_are_read_as_what_they_are(oracles, tmp_path):
    module = "model.layers.1.mlp.down_proj"

    def tensors(t):
        unquantize(t, module)
        t[f"{module}.weight"] = (t[f"{module}.weight"] * 64).astype(ml_dtypes.float8_e4m3fn)
        t[f"{module}.weight_scale"] = np.asarray(1 / 64, np.float32)

    folder = edited(oracles / MODELOPT, tmp_path / "e", tensors=tensors)
    with pytest.warns(CheckpointWarning, match=f"1 modules are stored as FP8.*{module}"):
        found = load(folder)
    assert isinstance(found.params["layers_1"]["mlp"]["down_proj"]["weight"], FP8Weight)


def test_thousands_of_layers_named_one_by_one():
    """Plain names are looked up, not tried: 36 million comparisons would take minutes."""
    names = [f"backbone.layers.{i}.mixer.experts.{e}" for i in range(47) for e in range(128)]
    stated = QuantizationConfig("modelopt", ("FP8",), (), tuple((n, "FP8") for n in names))
    asked = [f"{name.replace('backbone', 'model')}.up_proj" for name in names]
    assert stated.algorithms_of([*asked, "backbone.layers.47.mixer.experts.0"]) == [
        *("FP8" for _ in names),
        None,
    ]


def ct_mixed(strategy: str, fp8_targets: str = "re:.*self_attn.*") -> dict:
    """llm-compressor's statement of a model with both formats."""
    nvfp4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    fp8 = {"num_bits": 8, "type": "float", "group_size": None, "strategy": strategy}
    groups = {
        "group_1": {"format": "float-quantized", "weights": fp8, "targets": [fp8_targets]},
        "group_0": {"format": "nvfp4-pack-quantized", "weights": nvfp4, "targets": ["re:.*mlp"]},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
@pytest.mark.parametrize("fp8_targets", ["re:.*self_attn.*", "Linear"])
def test_compressed_tensors_of_two_formats(tmp_path, strategy, fp8_targets):
    config = {"quantization_config": ct_mixed(strategy, fp8_targets)}
    stated = read_quantization(tmp_path, config)
    assert stated.algorithms == ("float-quantized", "nvfp4-pack-quantized")
    assert algorithm(stated, LAYER) == "float-quantized"
    assert algorithm(stated, "model.layers.11.mlp.up_proj") == "nvfp4-pack-quantized"
    assert algorithm(stated, "lm_head") is None


def test_fp8_with_a_scale_a_block(tmp_path):
    with pytest.raises(ConfigError, match="group_1: weights of 8 float bits with a scale a block"):
        read_quantization(tmp_path, {"quantization_config": ct_mixed("block")})
