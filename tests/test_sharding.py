"""Weights spread over a mesh: the same engine, the same numbers, a part on each device."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

import fp4jax
from fp4jax.checkpoints.sharding import place, tensor_axis
from fp4jax.marlin import MarlinWeight


def mesh_of(*shape: int, names=("model",)) -> Mesh:
    count = int(np.prod(shape))
    devices = jax.devices()[:count]
    assert len(devices) == count, "tests/conftest.py asks for four virtual devices"
    return Mesh(np.asarray(devices).reshape(shape), names)


@pytest.fixture(scope="module", params=["llama-odd-modelopt", "qwen3moe-ct"])
def engines(request, oracles):
    """Name, reference outputs, an engine on one device and one on four."""
    folder = oracles / request.param
    models = [
        fp4jax.load_model(folder, dtype="float32", mesh=mesh, progress=False)
        for mesh in (None, mesh_of(4))
    ]
    return request.param, load_file(folder / "oracle.safetensors"), *models


def leaves(params):
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]


def device_bytes(params) -> dict:
    """Bytes of each device's own part."""
    found: dict = {}
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return found


def largest_error(found, expected) -> float:
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())


def test_logits_are_those_of_one_device(engines):
    _, oracle, single, spread = engines
    ids = oracle["input_ids"]
    expected = np.asarray(single(ids))
    assert largest_error(spread(ids), expected) < 1e-5
    assert largest_error(spread(ids), oracle["logits"]) < 1e-5


@pytest.mark.parametrize("engines", ["qwen3moe-ct"], indirect=True)
def test_generation_under_the_mesh(engines):
    _, oracle, _, spread = engines
    result = fp4jax.batch_generate(
        spread, None, oracle["input_ids"].tolist(), max_tokens=16, ignore_eos=True
    )
    np.testing.assert_array_equal(np.asarray(result.tokens), oracle["greedy_ids"])


def test_the_engine_is_the_same(engines):
    _, _, single, spread = engines
    assert spread.engine_id == single.engine_id
    assert jax.tree.structure(spread.params) == jax.tree.structure(single.params)
    for (name, a), (_, b) in zip(leaves(single.params), leaves(spread.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)


def test_every_device_holds_a_part(engines):
    name, _, single, spread = engines
    parts = device_bytes(spread.params)
    assert len(parts) == 4 and len(set(parts.values())) == 1
    (part,) = set(parts.values())
    # Norms and scales are everywhere; sizes that do not divide are, too.
    share = {"llama-odd-modelopt": 0.45, "qwen3moe-ct": 0.27}[name]
    assert 0.25 * single.nbytes <= part <= share * single.nbytes, part / single.nbytes


def spec_of(leaf) -> tuple:
    spec = tuple(leaf.sharding.spec)
    return spec + (None,) * (leaf.ndim - len(spec))


def test_which_axis_is_split(oracles):
    """Projections into the residual stream along K, the rest along N, the small leaves not."""

    def load(name):
        mesh = mesh_of(4)
        model = fp4jax.load_model(oracles / name, dtype="float32", mesh=mesh, progress=False)
        assert all(isinstance(leaf.sharding, NamedSharding) for _, leaf in leaves(model.params))
        return model.params

    params = load("llama-modelopt")
    layer = params["layers_0"]
    qkv, out = (layer["self_attn"][name]["weight"] for name in ("qkv_proj", "o_proj"))
    down = layer["mlp"]["down_proj"]["weight"]
    assert spec_of(qkv.words) == spec_of(qkv.scales) == ("model", None)
    assert spec_of(down.words) == spec_of(down.scales) == (None, "model")
    assert spec_of(out.words) == ("model", None)  # K = 128 is two tiles of 64, not four
    assert spec_of(params["embed_tokens"]["weight"]) == ("model", None)
    for small in (qkv.global_scale, qkv.fingerprint, layer["input_layernorm"]["weight"]):
        assert set(spec_of(small)) == {None}
    parts = device_bytes(params)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert max(parts.values()) < 0.27 * total

    experts = load("qwen3moe-ct")["layers_0"]["mlp"]["gate_up_proj"]["weight"]
    assert experts.stack == (6,) and spec_of(experts.words) == (None, "model", None)

    params = load("llama-odd-modelopt")  # N = 301, padded to 304 = 4 * 76 where it is NVFP4
    head, table = params["lm_head"]["weight"], params["embed_tokens"]["weight"]
    assert (head.n, head.words.shape[0], spec_of(head.words)) == (301, 304, ("model", None))
    assert (table.shape[0], spec_of(table)) == (301, (None, None))


@pytest.mark.parametrize(
    ("shape", "names", "axis"),
    [((2, 2), ("tp", "data"), "tp"), ((3,), ("x",), "x")],
)
def test_other_meshes(oracles, shape, names, axis):
    """One axis is used; over the others, and where sizes do not divide, weights are repeated."""
    mesh = mesh_of(*shape, names=names)
    assert tensor_axis(mesh_of(2, 2, names=("data", "model"))) == "model"
    assert tensor_axis(mesh) == axis
    folder = oracles / "llama-modelopt"
    oracle = load_file(folder / "oracle.safetensors")
    model = fp4jax.load_model(folder, dtype="float32", mesh=mesh, progress=False)
    used = {entry for _, leaf in leaves(model.params) for entry in spec_of(leaf)}
    assert used == {None, axis}
    parts = device_bytes(model.params)
    assert len(parts) == int(np.prod(shape))
    assert max(parts.values()) < 0.7 * model.nbytes
    assert largest_error(model(oracle["input_ids"]), oracle["logits"]) < 1e-5


def test_placing_leaves_static_fields_alone(oracles):
    model = fp4jax.load_model(oracles / "llama-unshared-modelopt", dtype="float32", progress=False)
    weight = model.params["layers_0"]["self_attn"]["qkv_proj"]["weight"]
    assert isinstance(weight, MarlinWeight) and len(weight.shards) == 3
    path = ("layers_0", "self_attn", "qkv_proj", "weight")
    placed = place(weight, path, mesh_of(4))
    for field in dataclasses.fields(weight):
        if field.metadata.get("static"):
            assert getattr(placed, field.name) == getattr(weight, field.name)
    assert place(weight, path, None) is weight
    assert PartitionSpec(*spec_of(placed.words)) == PartitionSpec("model", None)
