"""The layers in plain numpy float64, one token and one head at a time, and random weights."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fp4jax.nvfp4 import NVFP4Weight

E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def random_nvfp4(rng, n: int, k: int, stack=(), divisor: bool = False) -> NVFP4Weight:
    """A random quantized matrix whose entries are about ``k ** -0.5`` large, on the host."""
    factor = (rng.uniform(0.5, 1.5, stack) / (3.6 * k**0.5)).astype(np.float32)
    return NVFP4Weight(
        packed=rng.integers(0, 256, (*stack, n, k // 2), np.uint8),
        scale=rng.uniform(0.4, 2, (*stack, n, k // 16)).astype(ml_dtypes.float8_e4m3fn),
        global_scale=np.asarray(1 / factor if divisor else factor, np.float32),
        global_is_divisor=divisor,
    )


def values(weight) -> np.ndarray:
    """Float64 matrix of an NVFP4 weight or of a plain array."""
    if not isinstance(weight, NVFP4Weight):
        return np.asarray(weight).astype(np.float64)
    packed = np.asarray(weight.packed)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    scale = np.asarray(weight.scale).astype(np.float64)
    factor = np.asarray(weight.global_scale, np.float64)[..., None, None]
    scale = scale / factor if weight.global_is_divisor else scale * factor
    return E2M1[codes] * np.repeat(scale, 16, axis=-1)


def rms_norm(x, weight, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def rotate(x, position: int, frequencies, factor: float = 1.0) -> np.ndarray:
    """One head's channels; pairs (i, i + half) turn as complex numbers."""
    half = len(frequencies)
    turned = (x[:half] + 1j * x[half : 2 * half]) * np.exp(1j * position * frequencies) * factor
    return np.concatenate([turned.real, turned.imag, x[2 * half :]])


def softmax(x) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def attend(query, keys, values_, positions, window=None, scale=None) -> np.ndarray:
    """[time, heads, dim] over [slots, kv_heads, dim]; slot s holds position s."""
    out = np.zeros(query.shape)
    group = query.shape[1] // keys.shape[1]
    for t, position in enumerate(positions):
        first = 0 if window is None else max(0, position - window + 1)
        for h in range(query.shape[1]):
            k, v = (a[first : position + 1, h // group] for a in (keys, values_))
            scores = k @ query[t, h] * (scale or query.shape[-1] ** -0.5)
            out[t, h] = softmax(scores) @ v
    return out


def silu(x) -> np.ndarray:
    return x / (1 + np.exp(-x))


def swiglu(x, gate, up, down) -> np.ndarray:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def mixture(x, router, gate, up, down, top_k: int, normalize: bool) -> np.ndarray:
    """[tokens, hidden]; ``gate``, ``up`` and ``down`` are [experts, n, k]."""
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        shares = softmax(router @ row)
        chosen = np.argsort(-shares)[:top_k]
        total = shares[chosen].sum() if normalize else 1.0
        for e in chosen:
            out[t] += shares[e] / total * swiglu(row, gate[e], up[e], down[e])
    return out


def sigmoid_routing(scores, bias, groups: int, top_groups: int, top_k: int) -> list[int]:
    """Experts of one token, best first: of the groups whose two best sum to most."""
    rating = (scores + bias).reshape(groups, -1)
    best = np.argsort(-np.sort(rating, axis=1)[:, -2:].sum(axis=1))[:top_groups]
    size = rating.shape[1]
    left = [g * size + i for g in best for i in range(size)]
    return sorted(left, key=lambda e: -rating.reshape(-1)[e])[:top_k]


def squared_relu_mlp(x, up, down) -> np.ndarray:
    return np.maximum(x @ up.T, 0) ** 2 @ down.T


def error(found, expected) -> float:
    """Relative to the largest value."""
    return float(np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max())
