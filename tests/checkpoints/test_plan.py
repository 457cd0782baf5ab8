"""The key table: every tensor of a checkpoint is used once, or skipped for a stated reason."""

from __future__ import annotations

import collections
import warnings
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_edits import (
    IDS,
    dequantized,
    edited,
    load,
    logits,
    quantize,
    unquantize,
)

from fp4jax.checkpoints.keys import linear
from fp4jax.checkpoints.plan import make_plan
from fp4jax.checkpoints.quantization import QuantizationConfig
from fp4jax.checkpoints.stored import find_matrix, read_nvfp4
from fp4jax.checkpoints.tensors import TensorFiles
from fp4jax.errors import CheckpointError, CheckpointWarning
from fp4jax.loading import open_checkpoint
from fp4jax.nvfp4 import dequantize

LLAMA, QWEN, MOE = "llama-modelopt", "qwen3-ct-nvfp4", "qwen3moe-modelopt"
BF16 = ml_dtypes.bfloat16


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    """Within ``tolerance`` of the largest value."""
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


FOLDER = Path(__file__).parents[1] / "oracles"
EACH_ORACLE = tuple(sorted(path.name for path in FOLDER.iterdir() if path.is_dir()))


def test_no_reference_checkpoint_is_missing():
    assert len(EACH_ORACLE) >= 15


@pytest.mark.parametrize("name", EACH_ORACLE)
def test_every_tensor_is_used_once_or_skipped_for_a_reason(oracles, name):
    opened = open_checkpoint(oracles / name)
    used = [tensor.name for node in opened.plan.nodes for tensor in node.tensors]
    skipped = [tensor.name for tensor, _ in opened.plan.skipped]
    counts = collections.Counter(used + skipped)
    assert counts == collections.Counter(opened.files.names())
    assert set(counts.values()) == {1}
    assert all(reason for _, reason in opened.plan.skipped)
    text = [name for name in skipped if not name.startswith(("model.visual.", "mtp."))]
    kinds = {name.rsplit(".", 1)[-1] for name in text}
    assert kinds <= {"input_scale", "input_global_scale", "k_scale", "v_scale"}
    paths = [node.path for node in opened.plan.nodes]
    assert len(set(paths)) == len(paths)
    assert opened.plan.warnings == ()


def test_what_is_skipped_and_why(oracles, tmp_path):
    extra = {
        "model.rotary_emb.inv_freq": "config",
        "model.layers.0.self_attn.rotary_emb.inv_freq": "config",
        "model.layers.0.self_attn.q_proj.input_scale": "16 bits",
        "model.layers.0.self_attn.q_proj.input_global_scale": "16 bits",
        "model.layers.0.self_attn.k_proj.k_scale": "KV cache",
        "model.layers.1.self_attn.v_scale": "KV cache",
    }

    def tensors(t):
        for name in list(t):
            if name.endswith("input_scale"):
                del t[name]
        t.update({name: np.ones(1, np.float32) for name in extra})

    folder = edited(oracles / LLAMA, tmp_path / "e", tensors=tensors)
    skipped = {tensor.name: reason for tensor, reason in open_checkpoint(folder).plan.skipped}
    assert skipped.keys() == extra.keys()
    for name, word in extra.items():
        assert word in skipped[name]
    assert load(folder).engine_id == load(oracles / LLAMA).engine_id


def test_a_tensor_that_two_keys_name_is_refused(oracles):
    files = TensorFiles.open(oracles / LLAMA)
    keys = [
        linear(name, "model.layers.0.self_attn.o_proj", 128, 128) for name in ("first", "second")
    ]
    with pytest.raises(CheckpointError, match=r"o_proj\.weight would be used twice"):
        make_plan(files, keys, QuantizationConfig("modelopt", ("NVFP4",)))


# --- the same weights, stored otherwise --------------------------------------------------------


def rename(t, old, new):
    for name in list(t):
        if name.startswith(old):
            t[new + name[len(old) :]] = t.pop(name)


def multimodal(prefix, head):
    def change(t):
        rename(t, "model.", prefix)
        rename(t, "lm_head", head)

    return change


def nested(config):
    text = {name: config.pop(name) for name in list(config) if name != "architectures"}
    config["text_config"] = text


def scalars(shape, leaf):
    def change(t):
        for name in t:
            if name.endswith(leaf):
                t[name] = t[name].reshape(shape)

    return change


@pytest.mark.parametrize(
    ("source", "tensors", "config"),
    [
        (LLAMA, multimodal("model.language_model.", "lm_head"), None),
        (LLAMA, multimodal("language_model.model.", "language_model.lm_head"), nested),
        (MOE, multimodal("model.language_model.", "model.lm_head"), nested),
        (QWEN, multimodal("model.language_model.", "lm_head"), nested),
        (LLAMA, scalars((1,), "weight_scale_2"), None),
        (QWEN, scalars((), "weight_global_scale"), None),
        (LLAMA, lambda t: t.update(dict(reversed(t.items()))), None),
    ],
    ids=["language_model", "llava", "moe", "compressed-tensors", "(1,)", "()", "order"],
)
def test_names_scalars_and_order_make_no_difference(oracles, tmp_path, source, tensors, config):
    folder = edited(oracles / source, tmp_path / "e", tensors=tensors, config=config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load(folder)
    assert found.engine_id == load(oracles / source).engine_id


def test_one_file_and_shards_are_the_same(oracles, tmp_path):
    sharded = oracles / "llama-odd-modelopt"
    single = edited(sharded, tmp_path / "e", tensors=lambda t: None)
    assert not list(single.glob("*.index.json")) and len(list(single.glob("*.safetensors"))) == 1
    assert load(single).engine_id == load(sharded).engine_id


# --- fused members that are stored in different ways -------------------------------------------


@pytest.fixture(scope="module")
def llama_logits(oracles):
    return logits(oracles / LLAMA)


MEMBERS = ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.gate_proj")


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
def test_an_ignored_member_of_a_fused_pair(oracles, tmp_path, llama_logits, dtype):
    folder = edited(
        oracles / LLAMA,
        tmp_path / "e",
        tensors=lambda t: [unquantize(t, module, dtype) for module in MEMBERS],
        quant=lambda stated: stated["exclude_modules"].extend(MEMBERS),
    )
    model = load(folder)
    attention = model.params["layers_0"]["self_attn"]["qkv_proj"]
    assert sorted(attention) == ["k_proj_weight", "q_proj_weight", "v_proj_weight"]
    assert attention["v_proj_weight"].dtype == dtype
    assert sorted(model.params["layers_1"]["mlp"]["gate_up_proj"]) == [
        "gate_proj_weight",
        "up_proj_weight",
    ]
    assert list(model.params["layers_1"]["self_attn"]["qkv_proj"]) == ["weight"]
    # bf16 rounds the global scale's product, f32 nothing.
    assert_close(np.asarray(model(IDS)), llama_logits, 1e-5 if dtype == np.float32 else 2e-2)


def test_members_and_experts_of_which_one_kind_is_unquantized(oracles, tmp_path):
    ups = [f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in range(2) for e in range(6)]
    folder = edited(
        oracles / MOE,
        tmp_path / "e",
        tensors=lambda t: [unquantize(t, module) for module in ups],
        quant=lambda stated: stated["exclude_modules"].append("*.up_proj"),
    )
    model = load(folder)
    experts = model.params["layers_0"]["mlp"]["gate_up_proj"]
    assert experts["up_proj_weight"].shape == (6, 64, 128)
    assert experts["gate_proj_weight"].shape == (6, 64, 128)
    assert_close(np.asarray(model(IDS)), logits(oracles / MOE))


def test_everything_unquantized(oracles, tmp_path, llama_logits):
    def tensors(t):
        for name in list(t):
            if name.endswith("weight_scale_2"):
                unquantize(t, name.removesuffix(".weight_scale_2"))
            elif name.endswith("input_scale"):
                t.pop(name, None)

    folder = edited(
        oracles / LLAMA,
        tmp_path / "e",
        tensors=tensors,
        config=lambda config: config.pop("quantization_config"),
    )
    (folder / "hf_quant_config.json").unlink()
    assert_close(logits(folder), llama_logits)


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_neighbours_in_other_dtypes(oracles, tmp_path, llama_logits, compute):
    """Norms in f32, q unquantized in f16 beside k and v in bf16, an f16 head."""
    q, k, v = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")

    def tensors(t):
        for name in list(t):
            if "norm" in name:
                t[name] = t[name].astype(np.float32)
        t["lm_head.weight"] = t["lm_head.weight"].astype(np.float16)
        for module, dtype in ((q, np.float16), (k, BF16), (v, np.float32)):
            unquantize(t, module, dtype)

    folder = edited(
        oracles / LLAMA,
        tmp_path / "e",
        tensors=tensors,
        quant=lambda stated: stated["exclude_modules"].extend([q, k, v]),
    )
    model = load(folder, compute)
    params = model.params
    wide = jnp.dtype(compute)
    assert params["layers_0"]["self_attn"]["qkv_proj"]["weight"].dtype == wide
    assert params["norm"]["weight"].dtype == wide
    # A stored 16-bit tensor stays in 16 bits.
    narrow = wide if wide.itemsize == 2 else jnp.dtype(jnp.float16)
    assert params["lm_head"]["weight"].dtype == narrow
    assert_close(np.asarray(model(IDS)), llama_logits, 3e-2)


def test_a_bias_of_one_member_only(oracles, tmp_path):
    """The others' part of the fused bias is zero; the config says nothing of biases: a warning."""
    name = "model.layers.0.self_attn.k_proj.bias"
    value = np.linspace(-1, 1, 64).astype(np.float16)
    folder = edited(oracles / LLAMA, tmp_path / "e", tensors=lambda t: t.update({name: value}))
    with pytest.warns(CheckpointWarning, match=f"1 biases are stored.*they are used: {name}"):
        model = load(folder)
    bias = np.asarray(model.params["layers_0"]["self_attn"]["qkv_proj"]["bias"])
    np.testing.assert_array_equal(bias[:128], 0)
    np.testing.assert_array_equal(bias[128:192], value)
    np.testing.assert_array_equal(bias[192:], 0)


# --- output heads -------------------------------------------------------------------------------


def tied(config):
    config["tie_word_embeddings"] = True


def test_a_tied_head_that_is_stored_too_is_skipped(oracles, tmp_path):
    def tensors(t):
        t["lm_head.weight"] = t["model.embed_tokens.weight"]

    folder = edited(oracles / LLAMA, tmp_path / "e", tensors=tensors, config=tied)
    opened = open_checkpoint(folder)
    assert opened.config.tie_word_embeddings and opened.plan.warnings == ()
    ((skipped, reason),) = [s for s in opened.plan.skipped if "lm_head" in s[0].name]
    assert skipped.name == "lm_head.weight" and "tied" in reason
    untied = edited(oracles / LLAMA, tmp_path / "u", tensors=tensors)
    assert_close(logits(folder), logits(untied), 1e-6)
    assert "lm_head" not in load(folder).params


def test_a_tied_config_beside_a_head_of_its_own(oracles, tmp_path, llama_logits):
    folder = edited(oracles / LLAMA, tmp_path / "e", config=tied)
    with pytest.warns(CheckpointWarning, match=r"lm_head\.weight is stored and differs"):
        model = load(folder)
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(np.asarray(model(IDS)), llama_logits)


def test_an_untied_config_without_a_head(oracles, tmp_path):
    folder = edited(oracles / LLAMA, tmp_path / "e", tensors=lambda t: t.pop("lm_head.weight"))
    with pytest.warns(CheckpointWarning, match="there is no lm_head; the embedding is used"):
        model = load(folder)
    assert model.config.tie_word_embeddings
    both = edited(
        oracles / LLAMA,
        tmp_path / "b",
        tensors=lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}),
    )
    assert_close(np.asarray(model(IDS)), logits(both), 1e-6)


def test_a_quantized_embedding_that_is_the_head_too(oracles, tmp_path):
    """Against the same table dequantized in numpy, once tied and once with the head apart."""

    def quantized(t):
        quantize(t, "model.embed_tokens")
        t.pop("lm_head.weight")

    def plain(t):
        quantized(t)
        unquantize(t, "model.embed_tokens")

    def apart(t):
        quantized(t)
        for leaf in ("weight", "weight_scale", "weight_scale_2"):
            t[f"lm_head.{leaf}"] = t[f"model.embed_tokens.{leaf}"]

    expected = logits(edited(oracles / LLAMA, tmp_path / "p", tensors=plain, config=tied))
    folder = edited(oracles / LLAMA, tmp_path / "t", tensors=quantized, config=tied)
    assert_close(logits(folder), expected)
    table = load(folder).params["embed_tokens"]["weight"]
    assert table.shape == (384, 128)
    with pytest.warns(CheckpointWarning, match="stored as NVFP4, whatever.*: lm_head"):
        untied = load(edited(oracles / LLAMA, tmp_path / "a", tensors=apart))
    assert_close(np.asarray(untied(IDS)), expected)


# --- single matrices ----------------------------------------------------------------------------


@pytest.mark.parametrize("source", [LLAMA, QWEN])
def test_stored_matrices_read_as_numpy_reads_them(oracles, source):
    files = TensorFiles.open(oracles / source)
    matrix = find_matrix(files, "model.layers.1.mlp.down_proj")
    tensors = {name: files.read(name) for name in files.names()}
    prefix = matrix.module
    if source == QWEN:
        tensors[f"{prefix}.weight"] = tensors[f"{prefix}.weight_packed"]
        divisor = tensors[f"{prefix}.weight_global_scale"]
        scale = tensors[f"{prefix}.weight_scale"].astype(np.float32) / divisor
        tensors[f"{prefix}.weight_scale"] = scale
        tensors[f"{prefix}.weight_scale_2"] = np.float32(1)
    found = np.asarray(dequantize(read_nvfp4(files, matrix)))
    np.testing.assert_array_equal(found, dequantized(tensors, prefix))
    assert found.shape == matrix.shape
    assert find_matrix(files, "model.nowhere") is None
