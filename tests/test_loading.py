"""What loading takes: device memory, progress, and the ways of calling it."""

from __future__ import annotations

import gc
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import fp4jax
from fp4jax import marlin
from fp4jax.errors import CheckpointError, ConfigError, TokenizerError
from fp4jax.loading import compute_dtype, open_checkpoint
from fp4jax.marlin import MarlinWeight
from fp4jax.nvfp4 import NVFP4Weight
from fp4jax.progress import progress_bar

HIDDEN, WIDTH, LAYERS, VOCAB, EXPERTS = 256, 1040, 2, 512, 4
"""1040 is no multiple of 64: K is padded."""


def quantized(tensors: dict, rng, module: str, n: int, k: int) -> None:
    tensors[f"{module}.weight"] = rng.integers(0, 256, (n, k // 2), np.uint8)
    scale = rng.uniform(0.5, 2, (n, k // 16)).astype(ml_dtypes.float8_e4m3fn)
    tensors[f"{module}.weight_scale"] = scale
    tensors[f"{module}.weight_scale_2"] = np.asarray(0.02, np.float32)


def write_large(folder, oracles, kind: str):
    """A checkpoint whose matrices are large beside everything else that JAX holds."""
    folder.mkdir()
    source = oracles / {"dense": "llama-modelopt", "experts": "qwen3moe-modelopt"}[kind]
    config = json.loads((source / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "head_dim": 64,
        "moe_intermediate_size": 304,
        "num_local_experts": EXPERTS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng, tensors = np.random.default_rng(0), {}
    tensors["model.norm.weight"] = np.ones(HIDDEN, ml_dtypes.bfloat16)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = rng.normal(size=(VOCAB, HIDDEN)).astype(ml_dtypes.bfloat16)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = np.ones(HIDDEN, ml_dtypes.bfloat16)
        for name, n in (("q", 256), ("k", 128), ("v", 128), ("o", HIDDEN)):
            quantized(tensors, rng, f"{prefix}.self_attn.{name}_proj", n, 256)
        owners, width = [f"{prefix}.mlp"], WIDTH
        if kind == "experts":
            for name in ("q_norm", "k_norm"):
                tensors[f"{prefix}.self_attn.{name}.weight"] = np.ones(64, ml_dtypes.bfloat16)
            router = rng.normal(size=(EXPERTS, HIDDEN)).astype(ml_dtypes.bfloat16)
            tensors[f"{prefix}.mlp.gate.weight"] = router
            owners, width = [f"{prefix}.mlp.experts.{e}" for e in range(EXPERTS)], 304
        for owner in owners:
            quantized(tensors, rng, f"{owner}.gate_proj", width, HIDDEN)
            quantized(tensors, rng, f"{owner}.up_proj", width, HIDDEN)
            quantized(tensors, rng, f"{owner}.down_proj", HIDDEN, width)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=["dense", "experts"])
def large(request, tmp_path_factory, oracles):
    return write_large(tmp_path_factory.mktemp(request.param) / "large", oracles, request.param)


def device_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def live_bytes() -> int:
    """The same once garbage is gone, which takes a while in a process of many tests."""
    gc.collect()
    return device_bytes()


def repack_bytes(node) -> tuple[int, int]:
    """Device bytes of one repack beside its result, and of the packed codes that it reads."""

    def stored(n: int) -> NVFP4Weight:
        stack = node.shape[:-2]
        shape = jax.ShapeDtypeStruct
        return NVFP4Weight(
            shape((*stack, n, node.k // 2), jnp.uint8),
            shape((*stack, n, node.k // 16), jnp.float8_e4m3fn),
            shape(stack, jnp.float32),
        )

    weights = tuple(stored(n) for n in node.rows)
    memory = jax.jit(marlin.repack).lower(weights).compile().memory_analysis()
    packed = sum(weight.packed.size for weight in weights)
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes, packed


def test_peak_memory_while_loading(large):
    """Never more than the final tree plus three times the largest packed tensor.

    What lies on the device is sampled after each node; what its repack takes in between is what
    the compiler states for it: arguments, result and temporary buffers.
    """
    plan = open_checkpoint(large).plan
    nodes = list(plan.nodes)
    before, samples = live_bytes(), []
    model = fp4jax.load_model(
        large, dtype="bfloat16", progress=lambda *_: samples.append(device_bytes() - before)
    )
    final = live_bytes() - before
    assert final == pytest.approx(model.nbytes, abs=1000)
    assert len(samples) == len(nodes) and samples == sorted(samples)

    needs = [repack_bytes(node) if node.format != "dense" else (0, 0) for node in nodes]
    largest = max(packed for _, packed in needs)
    peak = max(
        sample + extra for sample, (extra, _) in zip(samples, needs, strict=True)
    )  # a sample holds the node's result already
    assert peak <= final + 3 * largest
    # The bound means something: what a repack needs is a good part of it.
    assert max(extra for extra, _ in needs) > largest


def test_one_repack_takes_less_than_three_times_its_codes(large):
    """So the bound also holds where the largest tensor is the last one."""
    for node in open_checkpoint(large).plan.nodes:
        if node.format != "dense":
            extra, packed = repack_bytes(node)
            assert extra <= 3 * packed, node.path


def test_no_float_copy_of_the_model(large):
    """On the device there is at any time what the tree holds so far, and nothing more."""
    before = live_bytes()
    done: list[int] = []

    def look(stage, at, total):
        floats = [
            array
            for array in jax.live_arrays()
            if jnp.issubdtype(array.dtype, jnp.floating) and array.ndim > 1
        ]
        large_floats = [a.shape for a in floats if a.size > VOCAB * HIDDEN]
        assert large_floats == []
        done.append(device_bytes() - before)

    model = fp4jax.load_model(large, dtype="bfloat16", progress=look)
    sizes = {}
    for path, node in jax.tree_util.tree_leaves_with_path(
        model.params, is_leaf=lambda node: isinstance(node, MarlinWeight)
    ):
        sizes[jax.tree_util.keystr(path, simple=True, separator="/")] = node.nbytes
    expected = np.cumsum([sizes["/".join(node.path)] for node in open_checkpoint(large).plan.nodes])
    np.testing.assert_allclose(done, expected, atol=1000)
    # 4.5 bits a weight, padding included; a bf16 copy alone would be 16.
    weights = sum(
        np.prod(n.shape) for n in open_checkpoint(large).plan.nodes if n.format != "dense"
    )
    dense = sum(n.nbytes for n in open_checkpoint(large).plan.nodes if n.format == "dense")
    assert (model.nbytes - dense) * 8 / weights < 5


def test_the_device_is_as_before_once_a_model_is_gone(large):
    model = fp4jax.load_model(large, dtype="bfloat16", progress=False)
    del model
    before = live_bytes()
    model = fp4jax.load_model(large, dtype="bfloat16", progress=False)
    assert live_bytes() > before + 10**6
    del model
    assert live_bytes() == before


def test_progress_is_told_about_bytes(large, capsys):
    calls = []
    fp4jax.load_model(large, progress=lambda *call: calls.append(call))
    plan = open_checkpoint(large).plan
    assert {stage for stage, _, _ in calls} == {"load"}
    done = [at for _, at, _ in calls]
    np.testing.assert_array_equal(done, np.cumsum([node.nbytes for node in plan.nodes]))
    assert {total for _, _, total in calls} == {plan.nbytes} == {done[-1]}
    assert capsys.readouterr() == ("", "")


def test_progress_bars(oracles, capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as rich sees it
    for progress, drawn in ((True, True), (False, False), (None, False)):
        fp4jax.load_model(oracles / "llama-modelopt", progress=progress)
        out, err = capfd.readouterr()
        assert out == "" and ("load" in err) is drawn
    with progress_bar() as report:
        report("load", 1, 2)
        report("load", 2, 2)
        report("other", 1, 1)
    assert "other" in capfd.readouterr().err


def test_a_progress_callback_that_raises_ends_the_load(large):
    before = live_bytes()

    def stop(stage, at, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fp4jax.load_model(large, progress=stop)
    assert live_bytes() <= before + 1000


def test_dtypes(oracles):
    assert compute_dtype() == jnp.dtype(jnp.float32)  # on a CPU
    for dtype in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"), np.dtype(ml_dtypes.bfloat16)):
        assert compute_dtype(dtype) == jnp.dtype(jnp.bfloat16)
    with pytest.raises(ConfigError, match="float16 or float32"):
        compute_dtype("int4")
    model = fp4jax.load_model(oracles / "llama-modelopt", dtype=jnp.float16, progress=False)
    assert model.dtype == jnp.dtype(jnp.float16)
    assert model([[1, 2]]).dtype == jnp.float32
    assert "Llama" in repr(model) and "float16" in repr(model)


def test_a_folder_without_a_tokenizer(oracles):
    with pytest.raises(TokenizerError, match=r"tokenizer"):
        fp4jax.load(oracles / "llama-modelopt", progress=False)
    with pytest.raises((CheckpointError, TokenizerError), match=r"no such|nowhere"):
        fp4jax.load(oracles / "nowhere", progress=False)


def test_home_and_strings(oracles, tmp_path, monkeypatch):
    shutil.copytree(oracles / "llama-modelopt", tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    ids = [[5, 9, 200]]
    expected = np.asarray(fp4jax.load_model(oracles / "llama-modelopt", progress=False)(ids))
    found = fp4jax.load_model("~/model", progress=False)(ids)
    np.testing.assert_array_equal(np.asarray(found), expected)
