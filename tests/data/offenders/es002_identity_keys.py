"""ES002 offenders: each marked line is refused, and no other line is."""

from __future__ import annotations

import builtins
import weakref
from weakref import ref

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Block(nn.Module):
    width: int = 4


def address(weight):
    return id(weight)  # expect: ES002


def qualified(weight):
    return builtins.id(weight)  # expect: ES002


def addresses(leaves):
    return sorted(leaves, key=id), list(map(id, leaves))  # expect: ES002 ES002


def hashes(weight, x: Float[Array, "m k"], block: Block, tree: jax.Array):
    made = jnp.ones(3)
    return (
        hash(weight),  # expect: ES002
        hash(x),  # expect: ES002
        hash(block),  # expect: ES002
        hash((tree, 1)),  # expect: ES002
        hash(made),  # expect: ES002
        hash(tuple(made)),  # expect: ES002
        hash(made.reshape(3, 1)),  # expect: ES002
        object.__hash__(block),  # expect: ES002
        weight.__hash__(),  # expect: ES002
    )


def pointers(array):
    return (
        array.data_ptr(),  # expect: ES002
        getattr(array, "data_ptr")(),  # noqa: B009  # expect: ES002
        array.unsafe_buffer_pointer(),  # expect: ES002
        array.ctypes.data,  # expect: ES002
        array.__array_interface__["data"][0],  # expect: ES002
        array.__cuda_array_interface__,  # expect: ES002
    )


def weak_keys(cache, weight):
    cache[weakref.ref(weight)] = 1  # expect: ES002
    cache.setdefault((ref(weight), 0), 1)  # expect: ES002
    key = weakref.ref(weight)  # expect: ES002
    return cache.get(key), {weakref.ref(weight): 1}  # expect: ES002


class Repacker:
    def __init__(self):
        self._table = weakref.WeakKeyDictionary()  # expect: ES002
        self._alive = weakref.WeakSet()  # expect: ES002
