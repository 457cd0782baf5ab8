"""ES003 offenders: each marked line is refused, and no other line is."""

from __future__ import annotations

import functools
from functools import cache, cached_property, lru_cache
from functools import lru_cache as memo

import cachetools
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax._src.util import weakref_lru_cache
from jaxtyping import Array, Float


@lru_cache(maxsize=2)  # expect: ES003
def repack(weight):
    return weight


@cache  # expect: ES003
def annotated(x: Float[Array, "m k"]) -> int:
    return len(x)


@functools.cache  # expect: ES003
def returns(n: int) -> jax.Array:
    return load_table(n)


@memo  # expect: ES003
def makes(n: int):
    return jnp.arange(n)


remember = lru_cache(maxsize=4)


@remember  # expect: ES003
def through_an_alias(params):
    return params


@functools.lru_cache(8)  # expect: ES003
def makes_on_host(n: int):
    table = np.zeros(n)
    return table


@functools.partial(lru_cache, maxsize=8)  # expect: ES003
def unannotated(params, n):
    return n


@cachetools.cached({})  # expect: ES003
def third_party(module, n: int):
    return n


@weakref_lru_cache  # expect: ES003
def by_identity(key):
    return key


class Layer(nn.Module):
    width: int

    @cache  # noqa: B019  # expect: ES003
    def table(self, n: int) -> int:
        return n

    @cached_property  # expect: ES003
    def size(self) -> int:
        return 2 * self.width


class Engine:
    def __init__(self, params):
        self.params = params

    @cached_property  # expect: ES003
    def first(self):
        return self.params["first"]

    @lru_cache  # noqa: B019  # expect: ES003
    def repacked(self, tensor: Array) -> Array:
        return tensor


def load_table(n: int) -> jax.Array:
    return jnp.zeros(n)


remembered = cache(load_table)  # expect: ES003
configured = lru_cache(maxsize=4)(load_table)  # expect: ES003
inline = cache(lambda weight: weight)  # expect: ES003
