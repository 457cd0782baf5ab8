"""Tensors that do not fit the format or the config: the error names file, tensor and remedy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from checkpoint_edits import E2M1, edited, load, refused, unquantize

from fp4jax.errors import CheckpointError, FormatError, UnsupportedError

E4M3 = ml_dtypes.float8_e4m3fn
MODULE = "model.layers.1.mlp.down_proj"
FILE = "model.safetensors"
CT = "qwen3-ct-nvfp4a16"
MODELOPT = "llama-modelopt"


def drop(leaf):
    return lambda t: t.pop(f"{MODULE}.{leaf}")


def put(leaf, make):
    """Replaces a leaf of the module by ``make(old)``."""

    def change(t):
        t[f"{MODULE}.{leaf}"] = make(t[f"{MODULE}.{leaf}"])

    return change


def poke(leaf, index, bits):
    """Sets one scale's bits."""

    def change(t):
        value = t[f"{MODULE}.{leaf}"].copy()
        value.view(np.uint8)[index] = bits
        t[f"{MODULE}.{leaf}"] = value

    return change


def narrow(t):
    """K = 40: two and a half blocks."""
    t[f"{MODULE}.weight"] = t[f"{MODULE}.weight"][:, :20]
    t[f"{MODULE}.weight_scale"] = t[f"{MODULE}.weight_scale"][:, :3]


def fp8(t):
    unquantize(t, MODULE)
    t[f"{MODULE}.weight"] = t[f"{MODULE}.weight"].astype(E4M3)
    t[f"{MODULE}.weight_scale"] = np.asarray(1, np.float32)


def fp8_scale(scale):
    def change(t):
        fp8(t)
        t[f"{MODULE}.weight_scale"] = scale

    return change


def fp8_nan(bits):
    def change(t):
        fp8(t)
        t[f"{MODULE}.weight"].view(np.uint8)[7, 9] = bits

    return change


def scalar(value):
    return lambda old: np.full(old.shape, value, np.float32)


def both(t):
    t[f"{MODULE}.weight"] = np.zeros((128, 256), np.float32)


CASES = (  # fp4jax: allow ES001 (a table; the generator is used up where it stands)
    ("block scale missing", MODELOPT, drop("weight_scale"), CheckpointError,
     (f"{MODULE}.weight", f"block scale {MODULE}.weight_scale is missing", "download")),
    ("global scale missing", MODELOPT, drop("weight_scale_2"), CheckpointError,
     (f"global scale {MODULE}.weight_scale_2 is missing", "download")),
    ("ct block scale missing", CT, drop("weight_scale"), CheckpointError,
     (f"{MODULE}.weight_packed", f"block scale {MODULE}.weight_scale is missing", "download")),
    ("ct global scale missing", CT, drop("weight_global_scale"), CheckpointError,
     (f"global scale {MODULE}.weight_global_scale is missing", "download")),
    ("codes missing", MODELOPT, drop("weight"), CheckpointError,
     (f"{MODULE}.weight_scale has no weight", "download")),
    ("ct codes missing", CT, drop("weight_packed"), CheckpointError,
     (f"{MODULE}.weight_scale has no weight", "download")),
    ("codes and values", CT, both, CheckpointError,
     (f"{MODULE}.weight_packed", f"{MODULE}.weight,", "which is meant")),
    ("signed codes", MODELOPT, put("weight", lambda v: v.view(np.int8)), CheckpointError,
     (f"{MODULE}.weight is int8", "uint8", "download")),
    ("f64 values", MODELOPT, put("weight", lambda v: v.astype(np.float64)), CheckpointError,
     (f"{MODULE}.weight is float64", "bfloat16", "download")),
    ("ct codes in another dtype", CT, put("weight_packed", lambda v: v.astype(np.int32)),
     FormatError, (f"{MODULE}.weight_packed", "uint8 [N, K/2]", "download")),
    ("values beside scales", MODELOPT, put("weight", lambda v: v.astype(np.float16)),
     CheckpointError, (f"{MODULE}.weight_scale", "unquantized", "download")),
    ("codes with three axes", MODELOPT, put("weight", lambda v: v[None]), FormatError,
     (f"{MODULE}.weight", "uint8 [N, K/2]", "download")),
    ("block scale dtype", MODELOPT, put("weight_scale", lambda v: v.view(np.uint8)), FormatError,
     (f"{MODULE}.weight_scale", "float8_e4m3fn [128, 16]", "download")),
    ("block scale e5m2", CT, put("weight_scale", lambda v: v.view(ml_dtypes.float8_e5m2)),
     FormatError, (f"{MODULE}.weight_scale", "float8_e4m3fn [128, 16]", "download")),
    ("block scale shape", MODELOPT, put("weight_scale", lambda v: v[:, :-1]), FormatError,
     (f"{MODULE}.weight_scale", "float8_e4m3fn [128, 16]", "download")),
    ("block scale of another matrix", MODELOPT, put("weight_scale", lambda v: v.T.copy()),
     FormatError, (f"{MODULE}.weight_scale", "float8_e4m3fn [128, 16]", "download")),
    ("global scale dtype", MODELOPT, put("weight_scale_2", lambda v: v.astype(np.float16)),
     FormatError, (f"{MODULE}.weight_scale_2", "one float32", "download")),
    ("global scale shape", CT, put("weight_global_scale", lambda v: np.ones(2, np.float32)),
     FormatError, (f"{MODULE}.weight_global_scale", "one float32", "download")),
    ("K no multiple of 16", MODELOPT, narrow, FormatError,
     (f"{MODULE}.weight", "K = 40", "multiple of 16", "quantize")),
    ("NaN block scale", MODELOPT, poke("weight_scale", (5, 3), 0x7F), FormatError,
     (f"{MODULE}.weight_scale", "[5, 3]", "NaN", "damaged")),
    ("negative NaN block scale", CT, poke("weight_scale", (0, 0), 0xFF), FormatError,
     (f"{MODULE}.weight_scale", "[0, 0]", "NaN", "damaged")),
    ("negative block scale", CT, poke("weight_scale", (127, 15), 0x81), FormatError,
     (f"{MODULE}.weight_scale", "[127, 15]", "negative", "damaged")),
    *(
        (f"global scale {value}", source, put(leaf, scalar(value)), FormatError,
         (f"{MODULE}.{leaf}", "finite and positive", "download"))
        for source, leaf in ((MODELOPT, "weight_scale_2"), (CT, "weight_global_scale"))
        for value in (0.0, -1.0, np.nan, np.inf)
    ),
    ("FP8 without a scale", MODELOPT, lambda t: [fp8(t), t.pop(f"{MODULE}.weight_scale")],
     CheckpointError, (f"{MODULE}.weight is FP8", f"{MODULE}.weight_scale is missing", "download")),
    ("FP8 with a scale a block", MODELOPT, fp8_scale(np.ones((1, 2), np.float32)), FormatError,
     (f"{MODULE}.weight_scale", "[128, 1]", "a scale a block is not supported")),
    ("FP8 with an integer scale", MODELOPT, fp8_scale(np.ones((), np.int32)), FormatError,
     (f"{MODULE}.weight_scale", "int32", "one float or one a row")),
    *(
        (f"FP8 scale {value}", MODELOPT, fp8_scale(np.full((128, 1), value, np.float32)),
         FormatError, (f"{MODULE}.weight_scale", "[0, 0]", "finite and positive", "download"))
        for value in (0.0, -1.0, np.nan, np.inf)
    ),
    *(
        (f"FP8 value {bits:#x}", MODELOPT, fp8_nan(bits), FormatError,
         (f"{MODULE}.weight", "[7, 9] is NaN", "download"))
        for bits in (0x7F, 0xFF)
    ),
    ("norm in integers", MODELOPT,
     lambda t: t.update({"model.norm.weight": np.ones(128, np.int32)}), CheckpointError,
     ("model.norm.weight is int32", "bfloat16", "download")),
    ("norm of another size", MODELOPT,
     lambda t: t.update({"model.norm.weight": np.ones(64, np.float32)}), CheckpointError,
     ("model.norm.weight has shape [64]", "call for [128]", "config.json")),
    ("norm missing", MODELOPT, lambda t: t.pop("model.norm.weight"), CheckpointError,
     ("1 tensors", "missing: model.norm.weight", "download")),
    ("linear missing", MODELOPT,
     lambda t: [t.pop(name) for name in list(t) if name.startswith(MODULE)], CheckpointError,
     ("1 tensors", f"missing: {MODULE}.weight", "download")),
    ("bias of another size", MODELOPT,
     lambda t: t.update({f"{MODULE}.bias": np.ones(5, np.float32)}), CheckpointError,
     (f"{MODULE}.bias has shape [5]", "call for [128]")),
    ("bias in integers", MODELOPT,
     lambda t: t.update({f"{MODULE}.bias": np.ones(128, np.uint8)}), CheckpointError,
     (f"{MODULE}.bias is uint8", "bfloat16")),
    ("left over", MODELOPT, lambda t: t.update({"model.layers.0.extra": np.ones(3, np.float32)}),
     CheckpointError, ("1 tensors belong to no part", "model.layers.0.extra", "config.json")),
    ("scale beside a norm", MODELOPT,
     lambda t: t.update({"model.norm.weight_scale": np.ones((), np.float32)}), CheckpointError,
     ("belong to no part", "model.norm.weight_scale")),
    ("many left over", MODELOPT,
     lambda t: t.update({f"vision.{i}": np.ones(3, np.float32) for i in range(9)}),
     CheckpointError, ("9 tensors belong to no part", "vision.4", "and 4 more")),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*are stored as FP8")
@pytest.mark.parametrize(
    ("source", "change", "error", "words"),
    [case[1:] for case in CASES],
    ids=[case[0].replace(" ", "-") for case in CASES],
)
def test_bad_tensors_are_refused(oracles, tmp_path, source, change, error, words):
    folder = edited(oracles / source, tmp_path / "edited", tensors=change)
    file = () if "belong to no part" in words[0] or "1 tensors" in words[0] else (FILE,)
    with refused(error, str(folder), *file, *words):
        load(folder)


def test_the_table_covers_each_file_format_and_the_table_of_codes_is_right():
    assert {case[1] for case in CASES} == {CT, MODELOPT}
    assert E2M1[[1, 7, 9, 15]].tolist() == [0.5, 6, -0.5, -6]


def test_experts_that_are_stored_in_different_ways(oracles, tmp_path):
    expert = "model.layers.0.mlp.experts.3.up_proj"
    folder = edited(
        oracles / "qwen3moe-modelopt",
        tmp_path / "edited",
        tensors=lambda t: unquantize(t, expert, ml_dtypes.bfloat16),
    )
    with refused(UnsupportedError, FILE, "experts", "up_proj", "stored alike"):
        load(folder)


def test_one_expert_missing(oracles, tmp_path):
    expert = "model.layers.1.mlp.experts.5."
    folder = edited(
        oracles / "qwen3moe-ct",
        tmp_path / "edited",
        tensors=lambda t: [t.pop(name) for name in list(t) if name.startswith(expert)],
    )
    with refused(CheckpointError, "3 tensors", f"{expert}down_proj.weight", "download"):
        load(folder)


def test_the_bad_scale_of_an_expert_is_named(oracles, tmp_path):
    name = "model.layers.1.mlp.experts.4.gate_proj.weight_scale"

    def change(t):
        value = t[name].copy()
        value.view(np.uint8)[2, 1] = 0x7F
        t[name] = value

    folder = edited(oracles / "qwen3moe-ct", tmp_path / "edited", tensors=change)
    with refused(FormatError, FILE, name, "[2, 1]", "NaN"):
        load(folder)
