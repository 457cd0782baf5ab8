"""ES004 offenders: each marked line is refused, and no other line is."""

from __future__ import annotations

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

TABLE = jnp.asarray([0, 0.5, 1, 1.5])  # expect: ES004
HOST_TABLE = np.arange(16)  # expect: ES004
SCALED = np.ones(4) * 2.0  # expect: ES004
INDIRECT = np.eye(3)  # expect: ES004
PLACED = jax.device_put(3.0)  # expect: ES004
UNUSED_IN_TRACE = jnp.zeros(3)


@jax.jit
def decode(codes):
    return TABLE[codes] + HOST_TABLE[codes] + PLACED


@functools.partial(jax.jit, static_argnums=0)
def scaled(n, x):
    return x * SCALED + helper(x)


compiled = partial(jax.jit, static_argnames=("n",))


def through_an_alias(params, x):
    @compiled
    def step(x, n):  # expect: ES004
        return x @ params["w"] * n

    return step(x, n=1)


def helper(x):
    return INDIRECT @ x


def host_only():
    return UNUSED_IN_TRACE + 1


def capture_in_nested(params, tokens):
    @jax.jit
    def step(tokens):  # expect: ES004
        return tokens @ params["w"]

    return step(tokens)


def capture_in_lambda(module: nn.Module, params, tokens):
    run = jax.jit(lambda tokens: module.apply({"params": params}, tokens))  # expect: ES004
    return run(tokens)


def capture_by_name(x: Float[Array, "m k"], y):
    def body(y):
        return x + y

    return jax.jit(jax.vmap(body))(y)  # expect: ES004


def capture_by_value(y):
    offset = jnp.ones(3).reshape(3, 1)
    run = jax.jit(lambda y: y + offset)  # expect: ES004
    return run(y)


def capture_attribute(engine, y):
    return jax.jit(lambda y: y @ engine.params["w"])(y)  # expect: ES004


def capture_model(model, y):
    return jax.jit(lambda y: model(y))(y)  # expect: ES004


def capture_in_partial(step, params, tokens):
    return jax.jit(partial(step, params))(tokens)  # expect: ES004


def default_is_an_array(x, table=jnp.arange(3)):  # noqa: B008  # expect: ES004
    return x + table


class Engine:
    def __init__(self, params):
        self.params = params
        self.step = jax.jit(self._step)  # expect: ES004

    def _step(self, tokens):
        return tokens @ self.params["w"]

    @partial(jax.jit, static_argnums=0)
    def static_self(self, tokens):  # expect: ES004
        return tokens @ self.params["w"]

    def nested(self, tokens):
        return jax.jit(lambda tokens: tokens @ self.params["w"])(tokens)  # expect: ES004
