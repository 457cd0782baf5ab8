"""Float64 references of the W4A16 ops in numpy, and random operands for them.

Written from the format's definition, apart from the package: codes are looked up in a table and
scales read as numpy floats.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fp4jax.marlin import MarlinWeight, repack
from fp4jax.nvfp4 import NVFP4Weight

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def dense(weight: NVFP4Weight) -> np.ndarray:
    """[..., N, K] in float64."""
    packed = np.asarray(weight.packed)
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = packed & 15, packed >> 4
    scale = np.repeat(np.asarray(weight.scale).astype(np.float64), 16, axis=-1)
    total = np.asarray(weight.global_scale, np.float64)[..., None, None]
    return E2M1[codes] * (scale / total if weight.global_is_divisor else scale * total)


def matmul(x, weights: list[NVFP4Weight], bias=None) -> np.ndarray:
    """``x @ concat(weights).T + bias`` in float64."""
    w = np.concatenate([dense(weight) for weight in weights], axis=-2)
    y = np.asarray(x).astype(np.float64) @ w.T
    return y if bias is None else y + np.asarray(bias).astype(np.float64)


def grouped_matmul(x, weights: list[NVFP4Weight], group_sizes) -> np.ndarray:
    """Row by row with the owner's matrix; rows past the groups are 0."""
    w = np.concatenate([dense(weight) for weight in weights], axis=-2)
    x, y, row = np.asarray(x).astype(np.float64), np.zeros((len(x), w.shape[1])), 0
    for expert, size in enumerate(group_sizes):
        for _ in range(size):
            y[row] = w[expert] @ x[row]
            row += 1
    return y


def make_weights(
    shards, k: int, *, stack=(), divisor: bool = False, seed: int = 0
) -> tuple[list[NVFP4Weight], MarlinWeight]:
    """Random shards with unequal global scales, zero and subnormal blocks; and their repack."""
    rng = np.random.default_rng(seed)
    found = []
    for i, n in enumerate(shards):
        scale = rng.uniform(0.1, 4, (*stack, n, k // 16)).astype(np.float32)
        scale[rng.random(scale.shape) < 0.05] = 0
        scale[rng.random(scale.shape) < 0.05] = 3 * 2.0**-9
        factor = np.full(stack, 0.01 * (i + 1), np.float32)
        found.append(
            NVFP4Weight(
                packed=rng.integers(0, 256, (*stack, n, k // 2), np.uint8),
                scale=scale.astype(ml_dtypes.float8_e4m3fn),
                global_scale=np.asarray(1 / factor if divisor else factor, np.float32),
                global_is_divisor=divisor,
            )
        )
    return found, repack(found)


def make_x(m: int, k: int, dtype, *, seed: int = 1) -> np.ndarray:
    """Random normal rows in ``dtype`` (a numpy or ml_dtypes one)."""
    return np.random.default_rng(seed).standard_normal((m, k)).astype(dtype)


def error(found, wanted: np.ndarray) -> float:
    """Relative Frobenius error."""
    found = np.asarray(found).astype(np.float64)
    assert found.shape == wanted.shape
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))
