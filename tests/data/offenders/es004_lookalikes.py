"""Look-alikes of ES004: all of this passes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

CODES = (0, 0.5, 1, 1.5)
DTYPE = jnp.bfloat16
MAXIMUM = jnp.finfo(DTYPE).max
HALF = np.float32(0.5)
HOST_ONLY = np.arange(16)
SHAPE = jax.ShapeDtypeStruct((4,), jnp.float32)
SHAPED = np.zeros((4, 4))


@jax.jit
def decode(codes):
    return jnp.asarray(CODES, DTYPE)[codes] * HALF + jnp.zeros(SHAPED.shape, DTYPE)[0, 0]


def host_side(index):
    return HOST_ONLY[index]


@functools.partial(jax.jit, static_argnames=("module",))
def apply(module, params, tokens):
    return module.apply({"params": params}, tokens)


def make_step(config, chunk: int, num_weights: int, weights: int = 3):
    @jax.jit
    def step(params, tokens):
        return params["w"][: config.n] + chunk + num_weights + weights + tokens

    return step


def closes_over_module(module, params, tokens):
    return jax.jit(lambda params, tokens: module.apply(params, tokens))(params, tokens)


def closes_over_shape(x: jax.Array, y):
    return jax.jit(lambda y: jnp.zeros(x.shape, x.dtype) + y)(y)


@jax.jit
def tracers(params, xs):
    # Both close over values of the same trace, not over arrays of an engine.
    @jax.jit
    def inner(x):
        return x @ params["w"]

    def body(carry, x):
        return carry + inner(x) @ params["w"], None

    return jax.lax.scan(body, jnp.zeros(3), xs)[0]


def eager(params, tokens):
    return jax.vmap(lambda token: token @ params["w"])(tokens)


def bound_values(step, chunk, tokens):
    return jax.jit(functools.partial(step, chunk=chunk, axis=0))(tokens)


class Engine:
    def __init__(self, params, config):
        self.params = params
        self.config = config
        self.step = jax.jit(self._step)

    def _step(self, params, tokens):
        return tokens @ params["w"] * self.config.scale
