"""Quantizing a checkpoint on disk, against what the vendors' own tools wrote."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import fp4jax
from fp4jax.checkpoints import writer
from fp4jax.checkpoints.quantization import read_quantization
from fp4jax.checkpoints.tensors import TensorFiles
from fp4jax.checkpoints.writer import quantize_checkpoint
from fp4jax.errors import CheckpointError, ConfigError, FormatError, UnsupportedError
from fp4jax.loading import open_checkpoint

DATA = Path(__file__).parents[1] / "data" / "quantize"
BF16 = np.dtype(ml_dtypes.bfloat16)


def read_all(folder: Path) -> dict[str, np.ndarray]:
    files = TensorFiles.open(folder)
    return {name: files.read(name) for name in files.names()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert sorted(a) == sorted(b)
    for name, value in a.items():
        assert (value.dtype, value.shape) == (b[name].dtype, b[name].shape), name
        assert value.tobytes() == b[name].tobytes(), name


def quantized_modules(folder: Path) -> set[str]:
    names = TensorFiles.open(folder).names()
    return {n.removesuffix(".weight_scale") for n in names if n.endswith(".weight_scale")}


def copy_source(folder: Path, changes=None, name: str = "llama", **config) -> Path:
    """A source checkpoint with some tensors and config fields changed."""
    shutil.copytree(DATA / name / "source", folder)
    tensors = read_all(folder) | (changes or {})
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_the_same_bits_and_statements_as_the_vendors_tool(tmp_path, name, form):
    target = quantize_checkpoint(DATA / name / "source", tmp_path / "target", format=form)
    reference = DATA / name / form
    same(read_all(target), read_all(reference))
    ours, theirs = (
        json.loads((folder / "config.json").read_text()) for folder in (target, reference)
    )
    stated, wanted = ours.pop("quantization_config"), theirs.pop("quantization_config")
    assert ours == json.loads((DATA / name / "source" / "config.json").read_text())
    assert sorted(stated.pop("ignore")) == sorted(wanted.pop("ignore"))
    group, vendor_group = (s.pop("config_groups")["group_0"] for s in (stated, wanted))
    # Their observer, and the defaults that llmcompressor spells out, say nothing about the file.
    assert group.pop("weights").items() <= vendor_group.pop("weights").items()
    assert group == vendor_group
    assert stated.pop("producer", None) in (None, {"name": "fp4jax", "version": fp4jax.__version__})
    assert stated.items() <= wanted.items() and "quant_method" in stated
    own = "hf_quant_config.json"
    assert (target / own).exists() == (reference / own).exists() == (form == "modelopt")
    if form == "modelopt":
        stated, wanted = (json.loads((f / own).read_text()) for f in (target, reference))
        assert stated["quantization"] == wanted["quantization"]


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_what_is_written_loads_without_a_contradiction(tmp_path, form):
    target = quantize_checkpoint(DATA / "qwen3moe" / "source", tmp_path / "t", format=form)
    opened = open_checkpoint(target)
    assert opened.plan.warnings == () and opened.plan.tied
    assert opened.quantization.method == form
    assert fp4jax.load_model(target, progress=False).max_context == 128


def test_shards_hold_the_same_tensors(tmp_path):
    whole = quantize_checkpoint(DATA / "llama" / "source", tmp_path / "whole")
    parts = quantize_checkpoint(DATA / "llama" / "source", tmp_path / "parts", shard_bytes=8000)
    same(read_all(whole), read_all(parts))
    shards = sorted(file.name for file in parts.glob("*.safetensors"))
    count = len(shards)
    assert count > 2 and shards == [
        f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)
    ]
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in read_all(whole).values())
    for shard in shards:
        held = [name for name, file in index["weight_map"].items() if file == shard]
        size = sum(TensorFiles.open(parts).info(name).nbytes for name in held)
        modules = {name.rpartition(".")[0].rpartition(".")[0] for name in held}
        assert size <= 8000 or len(modules) == 1  # one group of fused linears is never split


def test_large_matrices_are_quantized_in_pieces_to_the_same_bits(tmp_path, monkeypatch):
    whole = quantize_checkpoint(DATA / "llama" / "source", tmp_path / "whole")
    monkeypatch.setattr(writer, "CHUNK_ELEMENTS", 64 * 7)
    pieces = quantize_checkpoint(DATA / "llama" / "source", tmp_path / "pieces")
    same(read_all(whole), read_all(pieces))


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        (None, {"lm_head"}),
        ((), set()),
        (["lm_head", "*.q_proj"], {"lm_head", "model.layers.0.self_attn.q_proj"}),
        (["re:.*down_proj$"], {"model.layers.0.mlp.down_proj"}),
        (
            ("model.layers.0.mlp", "model.embed_tokens"),
            {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")},
        ),
    ],
)
def test_exclusions(tmp_path, exclude, left):
    target = quantize_checkpoint(DATA / "llama" / "source", tmp_path / "t", exclude=exclude)
    source, found = read_all(DATA / "llama" / "source"), read_all(target)
    linears = {n.removesuffix(".weight") for n, v in source.items() if v.ndim == 2}
    linears -= {"model.embed_tokens"}
    assert quantized_modules(target) == linears - left
    for name in [*left, "model.embed_tokens", "model.norm"]:
        assert found[f"{name}.weight"].tobytes() == source[f"{name}.weight"].tobytes()
    stated = read_quantization(target, json.loads((target / "config.json").read_text()))
    algorithms = zip(linears, stated.algorithms_of(linears), strict=True)
    assert {name for name, algorithm in algorithms if algorithm is None} == left
    assert open_checkpoint(target).plan.warnings == ()


def test_partners_that_are_left_alone_do_not_set_the_scale(tmp_path):
    name = "model.layers.0.self_attn.{}_proj.weight"
    source = copy_source(tmp_path / "s", {name.format("q"): np.full((64, 64), 100, BF16)})
    both = read_all(quantize_checkpoint(source, tmp_path / "both"))
    one = read_all(quantize_checkpoint(source, tmp_path / "one", exclude=["*.q_proj"]))
    scale = name.format("k") + "_scale_2"
    assert both[scale] == np.float32(100 / 2688)
    assert one[scale] < both[scale] / 10


def test_what_cannot_be_quantized_is_left_alone_and_listed(tmp_path):
    rng = np.random.default_rng(0)
    mlp = "model.layers.0.mlp.{}_proj.weight"
    shapes = {"gate": (40, 64), "up": (40, 64), "down": (64, 40)}
    changes = {mlp.format(k): rng.standard_normal(v).astype(np.float32) for k, v in shapes.items()}
    changes["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    source = copy_source(tmp_path / "s", changes, intermediate_size=40)
    target = quantize_checkpoint(source, tmp_path / "t")
    assert quantized_modules(target) >= {f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up")}
    found = read_all(target)
    for name in (mlp.format("down"), "model.layers.0.self_attn.rotary_emb.inv_freq"):
        assert found[name].tobytes() == changes[name].tobytes()
    ignored = json.loads((target / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head", "model.embed_tokens", "model.layers.0.mlp.down_proj"]


def test_a_head_that_repeats_the_tied_embedding_is_not_written(tmp_path):
    embedding = read_all(DATA / "qwen3moe" / "source")["model.embed_tokens.weight"]
    source = copy_source(tmp_path / "s", {"lm_head.weight": embedding}, name="qwen3moe")
    target = quantize_checkpoint(source, tmp_path / "t", exclude=())
    assert "lm_head.weight" not in TensorFiles.open(target)


def test_biases_are_kept(tmp_path):
    attention = "model.layers.0.self_attn.{}_proj.bias"
    biases = {
        attention.format(name): np.arange(rows).astype(BF16)
        for name, rows in {"q": 64, "k": 32, "v": 32, "o": 64}.items()
    }
    source = copy_source(tmp_path / "s", biases, attention_bias=True)
    found = read_all(quantize_checkpoint(source, tmp_path / "t"))
    assert all(found[name].tobytes() == bias.tobytes() for name, bias in biases.items())


def test_other_files_are_copied_and_other_weights_are_not(tmp_path):
    source = copy_source(tmp_path / "s")
    kept = ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "README.md")
    for name in (*kept, "pytorch_model.bin", "model.gguf", "pytorch_model.bin.index.json"):
        (source / name).write_text(name)
    (source / "folder").mkdir()
    target = quantize_checkpoint(source, tmp_path / "t")
    written = {"config.json", "hf_quant_config.json", "model.safetensors"}
    assert {file.name for file in target.iterdir()} == {*kept, *written, "generation_config.json"}
    assert all((target / name).read_text() == name for name in kept)
    modes = {name: (target / name).stat().st_mode for name in written}
    assert len(set(modes.values())) == 1  # whoever can read one can read all


def test_progress_counts_the_bytes_of_the_source(tmp_path):
    seen = []
    quantize_checkpoint(
        DATA / "qwen3moe" / "source", tmp_path / "t", progress=lambda *args: seen.append(args)
    )
    total = sum(value.nbytes for value in read_all(DATA / "qwen3moe" / "source").values())
    assert {(stage, of) for stage, _, of in seen} == {("quantize", total)}
    done = [value for _, value, _ in seen]
    assert done == sorted(done) and done[-1] == total


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("llama", {"format": "gguf"}, ConfigError, "'gguf'.*modelopt, compressed-tensors"),
        ("llama", {"exclude": "lm_head"}, ConfigError, "list of module names.*'lm_head'"),
        ("llama", {"exclude": [3]}, ConfigError, "list of module names"),
        ("llama", {"exclude": ["*.w1"]}, ConfigError, r"'\*.w1' names no module"),
        ("llama", {"exclude": ["re:("]}, ConfigError, r"'re:\('"),
        ("llama", {"exclude": ["Linear"]}, ConfigError, "nothing is left"),
        (
            "qwen3moe",
            {"exclude": ["*.experts.1.*"]},
            UnsupportedError,
            r"experts\.1\.\w+ is left alone but other experts",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, name, options, error, message):
    with pytest.raises(error, match=message):
        quantize_checkpoint(DATA / name / "source", tmp_path / "t", **options)
    assert not any(tmp_path.iterdir())


def test_sources_that_cannot_be_quantized_are_refused(tmp_path, oracles):
    with pytest.raises(CheckpointError, match=r"already quantized: .* is modelopt"):
        quantize_checkpoint(DATA / "llama" / "modelopt", tmp_path / "t")
    with pytest.raises(CheckpointError, match=r"already quantized: .* is FP8"):
        quantize_checkpoint(oracles / "qwen3_5-modelopt-mixed", tmp_path / "t")
    with pytest.raises(CheckpointError, match=r"already quantized: .* is compressed-tensors"):
        quantize_checkpoint(DATA / "llama" / "compressed-tensors", tmp_path / "t")
    stated = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    source = copy_source(tmp_path / "stated", quantization_config=stated)
    with pytest.raises(CheckpointError, match="says that it is quantized"):
        quantize_checkpoint(source, tmp_path / "t")
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        quantize_checkpoint(tmp_path / "none", tmp_path / "t")
    source = copy_source(tmp_path / "missing", {"model.norm.weight": None})
    with pytest.raises(CheckpointError, match=r"model.norm.weight"):
        quantize_checkpoint(source, tmp_path / "t")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_left(tmp_path, value):
    name = "model.layers.0.mlp.up_proj.weight"
    bad = read_all(DATA / "llama" / "source")[name].copy()
    bad[3, 5] = value
    source = copy_source(tmp_path / "s", {name: bad})
    with pytest.raises(FormatError, match=rf"model.safetensors: {name} holds NaN or infinity"):
        quantize_checkpoint(source, tmp_path / "new" / "t")
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


def test_a_weight_that_is_too_large_is_named(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    source = copy_source(tmp_path / "s", {name: np.full((48, 64), 2.0**126, np.float32)})
    with pytest.raises(FormatError, match=rf"{name}: .*below 2\*\*126"):
        quantize_checkpoint(source, tmp_path / "t")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_leaves_nothing_behind(tmp_path, error):
    (tmp_path / "kept").mkdir()

    def interrupt(stage, done, total):
        if done > total // 2:
            # What is written so far is hidden and beside the target.
            assert [f.name for f in (tmp_path / "kept").iterdir()] != ["target"]
            raise error

    for target in (tmp_path / "kept" / "target", tmp_path / "new" / "deep" / "target"):
        with pytest.raises(error):
            quantize_checkpoint(
                DATA / "llama" / "source", target, progress=interrupt, shard_bytes=2000
            )
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]
    assert not any((tmp_path / "kept").iterdir())


def test_targets_that_are_there_already(tmp_path):
    source = DATA / "llama" / "source"
    (tmp_path / "empty").mkdir()
    assert quantize_checkpoint(source, tmp_path / "empty") == tmp_path / "empty"
    before = read_all(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="exists already"):
        quantize_checkpoint(source, tmp_path / "empty", exclude=())
    same(before, read_all(tmp_path / "empty"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="exists already"):
        quantize_checkpoint(source, tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        quantize_checkpoint(source, tmp_path / "file" / "target")
    assert (tmp_path / "file").read_text() == "x"


def test_a_folder_without_permission_is_named(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):  # as for anyone but root, who may write anywhere
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match=r"closed.*cannot be written"):
        quantize_checkpoint(DATA / "llama" / "source", tmp_path / "closed" / "target")


@pytest.mark.skipif(os.name != "posix", reason="file size limits are POSIX's")
def test_a_file_that_cannot_be_written_whole_is_told(tmp_path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"target: cannot be written .*large"):
            quantize_checkpoint(DATA / "llama" / "source", tmp_path / "target")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not any(tmp_path.iterdir())
