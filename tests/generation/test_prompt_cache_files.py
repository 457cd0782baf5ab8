"""Files of prompt caches: whole or not there, the same bits again, and refused where damaged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation_toy import HIDDEN, ToyConfig, make_toy
from safetensors import safe_open
from safetensors.numpy import save_file

import fp4jax
from fp4jax.errors import EngineMismatchError, Fp4JaxError, PromptCacheError
from fp4jax.generation import load_prompt_cache, make_prompt_cache, prompt_cache, save_prompt_cache
from fp4jax.model import engine_id

ORACLES = Path(__file__).parents[1] / "oracles"
TOKENS = tuple(range(1, 20))


@pytest.fixture(scope="module")
def cached(toy):
    return make_prompt_cache(toy, None, TOKENS)


@pytest.fixture
def file(tmp_path, cached):
    save_prompt_cache(tmp_path / "cache.safetensors", cached)
    return tmp_path / "cache.safetensors"


def refused(path, model, match: str, error: type[Fp4JaxError] = PromptCacheError) -> None:
    """It is refused before anything is put on a device."""

    def held() -> int:
        """Arrays that are as large as a leaf of a cache."""
        return sum(array.size > HIDDEN for array in jax.live_arrays())

    before = held()
    with pytest.raises(error, match=match):
        load_prompt_cache(path, model)
    assert held() <= before


@pytest.mark.parametrize("name", ["qwen3_5-ct", "nemotronh-mixed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_come_back(tmp_path, name, dtype):
    model = fp4jax.load_model(ORACLES / name, dtype=dtype, progress=False)
    made = make_prompt_cache(model, None, TOKENS)
    file = tmp_path / "cache"
    save_prompt_cache(file, made)
    found = load_prompt_cache(file, model)
    statics = [f.name for f in dataclasses.fields(made) if f.metadata.get("static")]
    assert len(statics) == 7
    assert all(getattr(found, name) == getattr(made, name) for name in statics)
    assert found.cache.keys() == made.cache.keys()
    kinds = set()
    for leaf, value in made.cache.items():
        axis = dict(made.axes).get(leaf)
        kinds.add((leaf.rsplit(".", 1)[-1], axis, value.dtype.name))
        kept = (slice(None),) * (axis or 0) + (slice(len(TOKENS)),) if axis else ()
        np.testing.assert_array_equal(found.cache[leaf][kept], value[kept])
        assert found.cache[leaf].dtype == value.dtype
    # Keys and values end with their tokens; states have none, and stay in f32.
    assert kinds >= {("keys", 1, dtype), ("values", 1, dtype), ("conv", None, dtype)}
    assert {kind[1:] for kind in kinds if kind[0] == "state"} == {(None, "float32")}
    np.testing.assert_array_equal(found.hidden, made.hidden)
    with safe_open(file, "numpy") as stored:
        sizes = {key: stored.get_slice(key).get_shape() for key in stored.keys()}  # noqa: SIM118
    assert {sizes[f"cache.{leaf}"][axis] for leaf, axis in made.axes} == {len(TOKENS)}


def test_every_truncation_is_told(file, toy, tmp_path):
    content, cut = file.read_bytes(), tmp_path / "cut"
    for length in (0, 5, 8, 200, len(content) // 2, len(content) - 1):
        cut.write_bytes(content[:length])
        refused(cut, toy, r"cut: .*(truncated|damaged).*make the prompt cache anew")


def test_every_damaged_byte_is_told(file, toy, tmp_path):
    content, bad = file.read_bytes(), tmp_path / "bad"
    header = 8 + int.from_bytes(content[:8], "little")
    rng = np.random.default_rng(0)
    engine = content.index(b'"engine_id":"') + 15
    places = [engine, header, len(content) - 1, *rng.integers(header, len(content), 20).tolist()]
    for place in places:
        changed = bytearray(content)
        changed[place] = changed[place] ^ 1
        bad.write_bytes(bytes(changed))
        refused(bad, toy, "bad: damaged: its content is not what was written; make")


def test_foreign_files_are_told(toy, tmp_path):
    refused(tmp_path / "none", toy, "none: no such prompt cache file")
    refused(tmp_path, toy, "no such prompt cache file")
    (tmp_path / "text").write_text("a text that is no safetensors file at all")
    refused(tmp_path / "text", toy, "not a safetensors file; make")
    weights = ORACLES / "llama-modelopt" / "model.safetensors"
    refused(weights, toy, "not a prompt cache of this package; give a file")
    save_file({"a": np.zeros(3)}, tmp_path / "bare")
    refused(tmp_path / "bare", toy, "not a prompt cache")
    known = {"format": prompt_cache.FORMAT_NAME}
    save_file({"a": np.zeros(3)}, tmp_path / "later", metadata={**known, "version": "2"})
    refused(tmp_path / "later", toy, "of version '2', where this package reads version '1'")
    known["version"] = prompt_cache.FORMAT_VERSION
    save_file({"a": np.zeros(3)}, tmp_path / "empty", metadata=known)
    refused(tmp_path / "empty", toy, "damaged")


@dataclasses.dataclass(frozen=True)
class OtherConfig(ToyConfig):
    theta: float = 1e4


def test_another_engine_is_refused(file, toy):
    other = make_toy(seed=1)
    ids = f"{file}: the prompt cache was made by engine {engine_id(toy.params)}, .*"
    refused(file, other, f"{ids}{engine_id(other.params)}; make it anew", EngineMismatchError)
    bf16 = dataclasses.replace(toy, dtype=jnp.bfloat16)
    refused(file, bf16, "dtype = float32, but this model has bfloat16; make it anew")
    refused(file, dataclasses.replace(toy, config=OtherConfig()), "config.theta = nothing")
    shorter = dataclasses.replace(toy, max_context=19)
    refused(file, shorter, "holds 19 tokens.*context of 19 .max_position_embeddings")
    copy = dataclasses.replace(toy, params=jax.tree.map(jnp.copy, toy.params), max_context=300)
    assert load_prompt_cache(file, copy).tokens == TOKENS


def test_a_cache_of_another_model_is_refused(tmp_path):
    models = [
        fp4jax.load_model(ORACLES / name, dtype="float32", progress=False)
        for name in ("qwen3_5-ct", "nemotronh-mixed")
    ]
    save_prompt_cache(tmp_path / "c", make_prompt_cache(models[0], None, TOKENS))
    refused(tmp_path / "c", models[1], "architecture = Qwen3_5, but this model has NemotronH")


def test_another_layout_names_the_leaf(toy, cached, tmp_path):
    """Files that are whole, but not what this model keeps."""

    def written(**leaves):
        cache = {
            name: leaf for name, leaf in {**cached.cache, **leaves}.items() if leaf is not None
        }
        save_prompt_cache(tmp_path / "c", dataclasses.replace(cached, cache=cache))
        return tmp_path / "c"

    keys = cached.cache["keys"]
    refused(written(keys=keys[:, :, :-1]), toy, r"float32\[1, 19, 23\] for keys, where .* 19, 24\]")
    refused(written(keys=keys.astype(jnp.float16)), toy, r"has float16\[1, 19, 24\] for keys")
    refused(written(values=None), toy, "has nothing for values, where this model keeps float32")
    refused(written(state=keys), toy, "float32.* for state, where this model keeps nothing")


def test_a_file_is_written_whole_or_not_at_all(file, toy, cached, monkeypatch, tmp_path):
    before, longer = file.read_bytes(), make_prompt_cache(toy, None, (*TOKENS, 5))

    def interrupted(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("safetensors.numpy.save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_prompt_cache(file, longer)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
    save_prompt_cache(file, longer)
    assert load_prompt_cache(file, toy).tokens == longer.tokens
    assert list(tmp_path.iterdir()) == [file]
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode
    with pytest.raises(PromptCacheError, match="nowhere/c: cannot be written"):
        save_prompt_cache(tmp_path / "nowhere" / "c", cached)


def test_metadata_says_what_it_is(file, cached):
    with safe_open(file, "numpy") as stored:
        metadata = stored.metadata()
    assert metadata["engine_id"] == cached.engine_id
    assert json.loads(metadata["facts"])["dtype"] == "float32"
