"""Files that are missing or damaged are named, before anything is put on a device."""

from __future__ import annotations

import json
import shutil
import struct

import numpy as np
import pytest
from checkpoint_edits import edited, load, refused

from fp4jax.checkpoints.tensors import TensorFiles
from fp4jax.errors import CheckpointError

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def single(oracles, tmp_path):
    """A checkpoint in one file."""
    return edited(oracles / "llama-modelopt", tmp_path / "single")


@pytest.fixture
def sharded(oracles, tmp_path):
    """A checkpoint in three files."""
    return edited(oracles / "llama-odd-modelopt", tmp_path / "sharded")


def test_the_unchanged_copies_load(single, sharded):
    for folder in (single, sharded):
        assert load(folder).nbytes > 0


def test_no_folder(tmp_path):
    with refused(CheckpointError, str(tmp_path / "nowhere"), "no such checkpoint folder"):
        load(tmp_path / "nowhere")


def test_a_file_in_place_of_the_folder(single):
    with refused(CheckpointError, "model.safetensors", "no such checkpoint folder"):
        load(single / "model.safetensors")


def test_no_config(single):
    (single / "config.json").unlink()
    with refused(CheckpointError, "config.json", "missing", "needs it"):
        load(single)


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "says"),
    [('{"a": 1', "not readable as JSON"), ("[1, 2]", "not a JSON object"), ("\xff", "JSON")],
    ids=["cut", "list", "bytes"],
)
def test_a_damaged_json_file(single, name, text, says):
    (single / name).write_bytes(text.encode("latin-1"))
    with refused(CheckpointError, name, says, "download it again"):
        load(single)


def test_no_weights(single):
    (single / "model.safetensors").unlink()
    with refused(CheckpointError, "neither model.safetensors nor", INDEX, "config.json"):
        load(single)


def test_weights_in_another_format(single):
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with refused(CheckpointError, ".bin", "convert them to safetensors"):
        load(single)


def test_a_missing_shard(sharded):
    (sharded / SHARD).unlink()
    with refused(CheckpointError, SHARD, INDEX, "download it again"):
        load(sharded)


def test_an_index_that_names_a_file_of_its_own(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00004-of-00003.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with refused(CheckpointError, "model-00004-of-00003.safetensors", INDEX, "download"):
        load(sharded)


@pytest.mark.parametrize("keep", [0, 4, 8, 200, -1], ids=lambda n: f"{n} bytes")
@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_a_truncated_file(single, sharded, layout, keep):
    path = single / "model.safetensors" if layout == "single" else sharded / SHARD
    path.write_bytes(path.read_bytes()[:keep])
    with refused(CheckpointError, path.name, "truncated", "download it again"):
        load(path.parent)


def test_a_file_that_shrinks_after_its_header_was_read(single):
    files = TensorFiles.open(single)
    last = list(files.names())[-1]
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=rf"{last}.*truncated.*again"):
        files.read(last)


def test_a_tensor_in_two_shards(sharded):
    other = TensorFiles.open(sharded).info("model.norm.weight").file
    shutil.copy(other, sharded / "copy.safetensors")
    index = json.loads((sharded / INDEX).read_text())
    moved = next(n for n, f in index["weight_map"].items() if f == other.name)
    index["weight_map"][moved] = "copy.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with refused(CheckpointError, "copy.safetensors", "which", INDEX, "puts in", other.name):
        load(sharded)


def test_a_tensor_that_its_shard_does_not_hold(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = SHARD
    (sharded / INDEX).write_text(json.dumps(index))
    with refused(CheckpointError, INDEX, "model.extra.weight", SHARD, "does not hold it"):
        load(sharded)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "not a safetensors index"),
        ("[]", "not a safetensors index"),
        ('{"weight_map": null}', "not a safetensors index"),
        ('{"weight_map": {"a": 3}}', "no file name"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "no file name"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "a stands there twice"),
    ],
)
def test_a_damaged_index(sharded, index, says):
    (sharded / INDEX).write_text(index)
    with refused(CheckpointError, INDEX, says):
        load(sharded)


def rewrite_header(path, change) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = change(data[8 : 8 + length])
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def header_field(name: str, field: str, value):
    """Sets one field of one tensor's header entry."""

    def change(header: bytes) -> bytes:
        entries = json.loads(header)
        entries[name][field] = value
        return json.dumps(entries).encode()

    return change


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda header: header[:-9], ["damaged safetensors header"]),
        (lambda header: b"\xff" + header[1:], ["damaged safetensors header"]),
        (lambda header: b"[1]", ["damaged safetensors header"]),
        (lambda header: header.replace(b'"model.norm.weight"', b'"lm_head.weight"'),
         ["lm_head.weight stands there twice"]),
        (header_field(NORM, "dtype", "F4"), [NORM, "unusable header entry"]),
        (header_field(NORM, "shape", None), [NORM, "unusable header entry"]),
        (header_field(NORM, "shape", [64]), [NORM, "256 bytes stored"]),
        (header_field(NORM, "shape", [-16, -8]), [NORM, "bytes stored"]),
        (header_field(NORM, "data_offsets", [-256, 0]), [NORM, "bytes stored"]),
        (header_field(NORM, "data_offsets", [10**9, 10**9 + 256]), [NORM, "truncated"]),
        (header_field(NORM, "data_offsets", 3), [NORM, "unusable header entry"]),
    ],
)  # fmt: skip
def test_a_damaged_header(single, change, words):
    rewrite_header(single / "model.safetensors", change)
    with refused(CheckpointError, "model.safetensors", *words):
        load(single)


def test_reading_gives_what_was_written(oracles, single):
    """Against the safetensors library, for the dtypes that its numpy front end has."""
    from safetensors import safe_open

    files = TensorFiles.open(single)
    compared = 0
    with safe_open(single / "model.safetensors", "np") as reference:
        assert sorted(files.names()) == sorted(reference.keys())
        for name in files.names():
            if files.info(name).dtype in (np.uint8, np.float32):
                value = files.read(name)
                np.testing.assert_array_equal(value, reference.get_tensor(name))
                assert value.shape == tuple(reference.get_slice(name).get_shape())
                compared += 1
    assert compared > 20
    with pytest.raises(CheckpointError, match="there is no tensor nope"):
        files.read("nope")
