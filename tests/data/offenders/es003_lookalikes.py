"""Look-alikes of ES003: all of this passes."""

from __future__ import annotations

import functools
from functools import cache, cached_property, lru_cache

import jax
import jax.numpy as jnp
import numpy as np


@cache
def device_kind() -> str:
    return jax.devices()[0].device_kind


@lru_cache(maxsize=64)
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.cache
def compiled(n: int, model: str, num_params: int):
    def body(x):
        return jnp.sum(x) * n

    return jax.jit(body)


@lru_cache
def largest(dtype: str) -> float:
    return float(jnp.finfo(jnp.dtype(dtype)).max)


@lru_cache
def half_sum(n: int) -> float:
    return float(np.arange(n).sum() / 2)


@cache
def loader(path: str, transform=None):
    return path


class Config:
    def __init__(self, sizes: tuple[int, ...]):
        self.sizes = sizes

    @cached_property
    def total(self) -> int:
        return sum(self.sizes)


def clear_cache(cache):
    cache.clear()
    return cache(lambda weight: weight)
