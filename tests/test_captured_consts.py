"""The trace half of the checker: arrays that became constants of a jaxpr."""

# fp4jax: allow-file ES004 (these tests capture on purpose)

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax import marlin
from fp4jax.check_engine_state import captured_arrays, check_captured
from fp4jax.errors import Fp4JaxError


def line_of(function, offset: int) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


def summary(found):
    return [(array.shape, array.dtype, array.on_device) for array in found]


@pytest.fixture
def weight():
    return jnp.ones((4, 6))


@pytest.fixture
def x():
    return jax.ShapeDtypeStruct((3, 4), jnp.float32)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_a_captured_array_is_refused_and_named(weight, x, wrap):
    def step(x):
        y = x * 2
        return y @ weight

    (array,) = captured_arrays(wrap(step), x)
    assert (array.shape, array.dtype, array.on_device) == ((4, 6), "float32", True)
    assert (array.primitive, array.place) == ("dot_general", line_of(step, 2))
    with pytest.raises(Fp4JaxError) as refused:
        check_captured(wrap(step), x)
    message = str(refused.value)
    assert "ES004 `step` captures" in message and "float32[4, 6]" in message
    assert line_of(step, 2) in message and "Pass them as arguments" in message


def test_the_same_array_as_an_argument_passes(weight, x):
    check_captured(lambda w, x: x @ w, weight, x)
    check_captured(jax.jit(lambda tree, x: x @ tree["w"]), {"w": weight}, x)


def test_keyword_and_static_arguments(weight, x):
    @functools.partial(jax.jit, static_argnames=("captures",))
    def step(x, *, scale, captures):
        return x @ weight if captures else x * scale

    check_captured(step, x, scale=2.0, captures=False)
    assert summary(captured_arrays(step, x, scale=2.0, captures=True)) == [
        ((4, 6), "float32", True)
    ]


def nested_jit(x, w):
    return jax.jit(lambda x: x @ w)(x)


def scan(x, w):
    return jax.lax.scan(lambda c, _: (c + w.sum(), None), x, None, length=2)[0]


def while_loop(x, w):
    return jax.lax.while_loop(lambda c: c[0, 0] < w[0, 0], lambda c: c + w.sum(), x)


def cond(x, w):
    return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x @ (w + 1), x)


def custom_vjp(x, w):
    @jax.custom_vjp
    def product(x):
        return x @ w

    product.defvjp(lambda x: (x @ w, None), lambda _, g: (g @ w.T,))
    return product(x)


def vmapped_remat(x, w):
    return jax.vmap(jax.checkpoint(lambda row: row @ w))(x)


def returned(x, w):
    return x, w


def partial_bound(x, w):
    return jax.jit(functools.partial(lambda w, x: x @ w, w))(x)


@pytest.mark.parametrize(
    "body",
    [
        nested_jit,
        scan,
        while_loop,
        cond,
        custom_vjp,
        vmapped_remat,
        returned,
        partial_bound,
    ],
)
def test_nested_computations_hide_nothing(body, weight, x):
    found = captured_arrays(jax.jit(lambda x: body(x, weight)), x)
    assert ((4, 6), "float32", True) in summary(found)
    assert captured_arrays(jax.jit(body), x, weight) == ()


def test_the_path_names_the_nested_function(weight, x):
    @jax.jit
    def inner(x):
        return x @ weight

    (array,) = captured_arrays(jax.jit(lambda x: inner(x) * 2), x)
    assert array.path.endswith("(inner)")


def test_scalars_pass(x):
    captured = jnp.float32(3)
    check_captured(lambda x: x * captured + np.float32(2), x)


def test_small_host_tables_pass_and_large_host_arrays_do_not(x):
    table, large = np.arange(4, dtype=np.float32), np.ones((65, 4), np.float32)
    check_captured(lambda x: x * table + jnp.asarray([1, 2, 3, 4], jnp.float32), x)
    found = captured_arrays(lambda x: large @ x.T, x)
    assert summary(found) == [((65, 4), "float32", False)]
    assert len(captured_arrays(lambda x: x * table, x, table_elements=0)) == 1


def test_a_repacked_weight_in_a_closure_is_refused_leaf_by_leaf():
    weight = marlin.random_weight(jax.random.key(0), (8,), 64)
    x = jax.ShapeDtypeStruct((2, 64), jnp.float32)

    def product(weight, x):
        return x @ marlin.dequantize_repacked(weight).T

    check_captured(product, weight, x)
    found = captured_arrays(lambda x: product(weight, x), x)
    assert set(summary(found)) >= {
        (weight.words.shape, "uint16", True),
        (weight.scales.shape, "uint8", True),
    }


def test_literal_arrays_are_found_too():
    # JAX can write captured arrays into the equations instead of beside them.
    code = (
        "import jax, jax.numpy as jnp\n"
        "from fp4jax.check_engine_state import captured_arrays\n"
        "assert jax.config.jax_use_simplified_jaxpr_constants\n"
        "w = jnp.ones((4, 6))\n"
        "inner = jax.jit(lambda x: x @ w)\n"
        "found = captured_arrays(lambda x: inner(x), jnp.ones((3, 4)))\n"
        "assert [a.shape for a in found] == [(4, 6)] and found[0].on_device, found\n"
    )
    environment = {**os.environ, "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "true"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
