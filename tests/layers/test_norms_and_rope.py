"""RMSNorm and rotary embedding against float64, and against transformers' frequencies."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from layer_references import error, rms_norm, rotate

from fp4jax.errors import ConfigError
from fp4jax.layers.norms import RMSNorm
from fp4jax.layers.rope import ROPE_TYPES, RopeConfig, apply_rope, inverse_frequencies

REFERENCE = json.loads(
    (Path(__file__).parents[1] / "data" / "transformers" / "rope.json").read_text()
)


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
@pytest.mark.parametrize("weight_dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_rms_norm(epsilon, weight_dtype):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(2, 3, 48)) * np.logspace(-3, 3, 3)[:, None]).astype(np.float32)
    weight = rng.normal(size=48).astype(weight_dtype)
    variables = {"params": {"weight": jnp.asarray(weight)}}
    found = RMSNorm(epsilon).apply(variables, jnp.asarray(x))
    expected = rms_norm(x.astype(np.float64), weight.astype(np.float64), epsilon)
    assert found.dtype == jnp.float32
    for row, wanted in zip(np.asarray(found).reshape(6, -1), expected.reshape(6, -1), strict=True):
        assert error(row, wanted) < 1e-6


def test_rms_norm_in_bf16_is_computed_in_f32():
    """Rounded where the public models round: after the division, and after the weight."""
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(5, 64)) * 300).astype(ml_dtypes.bfloat16)
    weight = rng.normal(size=64).astype(ml_dtypes.bfloat16)
    variables = {"params": {"weight": jnp.asarray(weight)}}
    found = np.asarray(RMSNorm(1e-6).apply(variables, jnp.asarray(x)))
    normed = rms_norm(x.astype(np.float64), 1.0, 1e-6).astype(ml_dtypes.bfloat16)
    expected = (normed.astype(np.float32) * weight.astype(np.float32)).astype(ml_dtypes.bfloat16)
    # A value that lies between two bf16 numbers may fall to the other side in f32.
    steps = np.abs(found.view(np.int16).astype(int) - expected.view(np.int16).astype(int))
    assert steps.max() <= 2 and (steps == 0).mean() > 0.98
    assert found.dtype == ml_dtypes.bfloat16


def test_rms_norm_rounded_last():
    """Exactly the value in f32, rounded once."""
    rng = np.random.default_rng(2)
    x = (rng.normal(size=(5, 64)) * 300).astype(ml_dtypes.bfloat16)
    weight = rng.normal(size=64).astype(ml_dtypes.bfloat16)
    variables = {"params": {"weight": jnp.asarray(weight)}}
    found = np.asarray(RMSNorm(1e-6, rounded_last=True).apply(variables, jnp.asarray(x)))
    exact = rms_norm(x.astype(np.float64), weight.astype(np.float64), 1e-6)
    wide = exact.astype(np.float32).astype(ml_dtypes.bfloat16)
    assert found.dtype == ml_dtypes.bfloat16
    assert (found == wide).mean() > 0.98
    early = np.asarray(RMSNorm(1e-6).apply(variables, jnp.asarray(x)))
    assert (early != wide).mean() > 0.1


@pytest.mark.parametrize("groups", [1, 3, 16])
def test_rms_norm_in_groups(groups):
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(2, 3, 48)) * np.logspace(-2, 2, 48)).astype(np.float32)
    weight = rng.normal(size=48).astype(np.float32)
    variables = {"params": {"weight": jnp.asarray(weight)}}
    found = np.asarray(RMSNorm(1e-6, groups=groups).apply(variables, jnp.asarray(x)))
    size = 48 // groups
    for g in range(groups):
        part = slice(g * size, (g + 1) * size)
        expected = rms_norm(x[..., part].astype(np.float64), weight[part].astype(np.float64), 1e-6)
        assert error(found[..., part], expected) < 1e-6


def reference_config(case) -> RopeConfig:
    longest = REFERENCE["max_position_embeddings"]
    return RopeConfig.from_hf(
        {"rope_parameters": case["rope_parameters"], "max_position_embeddings": longest}
    )


@pytest.mark.parametrize(
    "case", REFERENCE["cases"], ids=lambda c: c["rope_parameters"]["rope_type"]
)
def test_frequencies_are_those_of_transformers(case):
    rope = reference_config(case)
    found = inverse_frequencies(rope, REFERENCE["head_dim"])
    np.testing.assert_allclose(np.asarray(found), case["inv_freq"], rtol=3e-6)
    assert rope.attention_factor == pytest.approx(case["attention_factor"], rel=1e-12)


def test_the_reference_has_every_kind():
    kinds = {case["rope_parameters"]["rope_type"] for case in REFERENCE["cases"]}
    assert kinds == set(ROPE_TYPES)


def test_the_spellings_of_transformers_4_and_5_mean_the_same():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rest = {"max_position_embeddings": 131072}
    new = {**scaling, "rope_type": "llama3", "rope_theta": 5e5}
    expected = RopeConfig.from_hf({"rope_parameters": new, **rest})
    for old in (
        {"rope_theta": 5e5, "rope_scaling": {**scaling, "rope_type": "llama3"}},
        {"rope_theta": 500000, "rope_scaling": {**scaling, "type": "llama3"}},
        {"rope_theta": 7.0, "rope_scaling": None, "rope_parameters": new},
    ):
        assert RopeConfig.from_hf({**old, **rest}) == expected
    assert RopeConfig.from_hf({"rope_theta": 5e5}) == RopeConfig(theta=5e5)
    with pytest.raises(ConfigError, match="known: default, linear, llama3, yarn"):
        RopeConfig.from_hf({"rope_scaling": {"type": "longrope"}})


@pytest.mark.parametrize("rotary_dim", [None, 16, 8])
@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(),
        RopeConfig(theta=1e6, kind="linear", factor=4.0),
        RopeConfig(kind="yarn", factor=4.0, original_max_position=64, attention_factor=1.3),
    ],
    ids=lambda rope: rope.kind,
)
def test_rotation(rope, rotary_dim):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 5, 3, 16)).astype(np.float32)
    positions = np.asarray([[0, 1, 2, 3, 4], [7, 8, 60, 61, 4000]], np.int32)
    found = np.asarray(apply_rope(jnp.asarray(x), jnp.asarray(positions), rope, rotary_dim))
    frequencies = np.asarray(inverse_frequencies(rope, rotary_dim or 16), np.float64)
    factor = rope.attention_factor
    for b in range(2):
        for t in range(5):
            position = int(positions[b, t])
            for h in range(3):
                wide = x[b, t, h].astype(np.float64)
                expected = rotate(wide, position, frequencies, factor)
                # f32 angles: half a unit in the last place of the largest one.
                assert error(found[b, t, h], expected) < 1e-6 + position * 2**-23
    np.testing.assert_array_equal(found[..., rotary_dim or 16 :], x[..., rotary_dim or 16 :])


def test_scores_depend_on_the_distance_only():
    rng = np.random.default_rng(3)
    query, key = (jnp.asarray(rng.normal(size=(1, 1, 1, 32)).astype(np.float32)) for _ in range(2))

    def score(at: int, other: int) -> float:
        turned = [
            np.asarray(apply_rope(x, jnp.asarray([[p]], jnp.int32), RopeConfig()), np.float64)
            for x, p in ((query, at), (key, other))
        ]
        return float(np.vdot(*turned))

    assert score(9, 4) == pytest.approx(score(105, 100), rel=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-2)


def test_bf16_is_rotated_in_f32():
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.normal(size=(1, 2, 1, 16)).astype(np.float32)).astype(jnp.bfloat16)
    positions = jnp.asarray([[3, 900]], jnp.int32)
    found = apply_rope(x, positions, RopeConfig())
    expected = apply_rope(x.astype(jnp.float32), positions, RopeConfig())
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected.astype(jnp.bfloat16)))
