"""Rounding and division against NumPy and ml_dtypes, whose results are IEEE 754's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp4jax import rounding

TINY = np.finfo(np.float32).tiny
COUNT = 20_000


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def operands(rng, kind, exponents=(0, 1)) -> tuple[np.ndarray, np.ndarray]:
    """Dividends and divisors; the quotient is anything, a short number, or nearly a midpoint."""

    def significant():
        mantissa = rng.integers(2**23, 2**24, COUNT) * 2.0**-23
        return np.ldexp(mantissa, rng.integers(*exponents, COUNT)).astype(np.float32)

    b = significant()
    if kind == "any":
        return significant(), b
    if kind == "short":
        quotient = rng.integers(1, 64, COUNT) / 8
    else:
        quotient = (rng.integers(2**23, 2**24, COUNT) + 0.5) * 2.0**-23
    a = (quotient * b.astype(np.float64)).astype(np.float32)
    return (a.view(np.int32) + rng.integers(-1, 2, COUNT, dtype=np.int32)).view(np.float32), b


@pytest.mark.parametrize("kind", ["any", "short", "midway"])
def test_quotients_are_corrected(kind):
    a, b = operands(np.random.default_rng(0), kind)
    a = np.frexp(a)[0] * np.float32(2)  # in [1, 2), as is b
    want = a / b
    correct = jax.jit(rounding.correct_quotient)
    for off in range(-3, 4):
        wrong = (want.view(np.int32) + np.int32(off)).view(np.float32)
        np.testing.assert_array_equal(correct(a, b, wrong), want)


@pytest.mark.parametrize("kind", ["any", "short", "midway"])
def test_division_is_exact(kind):
    a, b = operands(np.random.default_rng(1), kind, exponents=(-120, 120))
    a[::2] *= -1
    with np.errstate(over="ignore", under="ignore"):
        want = a / b
    normal = np.abs(want) >= TINY
    assert normal.mean() > 0.6
    found = np.asarray(jax.jit(rounding.exact_divide)(a, b))
    np.testing.assert_array_equal(found[normal], want[normal])
    assert np.all(np.abs(found[~normal]) <= TINY)


@pytest.mark.parametrize("constant", [3.0, 6.0, 2688.0, 0.3])
def test_division_by_one_number_is_exact(constant):
    """The form that XLA rewrites to a product, whether a constant, broadcast or under vmap."""
    a, _ = operands(np.random.default_rng(2), "any")
    want = a / np.float32(constant)
    divisor = jnp.float32(constant)
    forms = {
        "constant": jax.jit(lambda a: rounding.exact_divide(a, jnp.float32(constant))),
        "broadcast": lambda a: jax.jit(rounding.exact_divide)(a, divisor),
        "vmap": jax.jit(jax.vmap(lambda a: rounding.exact_divide(a, divisor))),
    }
    for name, divide in forms.items():
        np.testing.assert_array_equal(divide(a), want, err_msg=name)


def test_division_of_special_values():
    a = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, 1], np.float32)
    b = np.array([2, 2, 2, 2, 2, np.inf, 0], np.float32)
    with np.errstate(divide="ignore"):
        np.testing.assert_array_equal(rounding.exact_divide(a, b), a / b)
    assert np.signbit(rounding.exact_divide(a, b)[1])


def e4m3_inputs() -> np.ndarray:
    """Every e4m3 value from 0 to 448, every midpoint, and their f32 neighbours."""
    values = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    around = [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(448))]
    x = np.unique(np.concatenate([*around, np.geomspace(1e-5, 448, 5000, dtype=np.float32)]))
    return x[(x == 0) | ((x >= TINY) & (x <= 448))]


def test_e4m3_rounds_once_and_to_even():
    x = e4m3_inputs()
    want = x.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(jax.jit(rounding.encode_e4m3)(x), bits(want))


def test_e2m1_rounds_to_even_and_saturates():
    ties = np.array(rounding.E2M1_TIES, np.float32)
    around = [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9))]
    x = np.concatenate([*around, np.linspace(0, 8, 4001, dtype=np.float32), [1e30, np.inf]])
    x = x.astype(np.float32)
    want = bits(np.minimum(x, 6).astype(ml_dtypes.float4_e2m1fn))
    np.testing.assert_array_equal(jax.jit(rounding.encode_e2m1)(x), want)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_round_to_equals_a_convert(dtype):
    rng = np.random.default_rng(3)
    x = np.exp2(rng.uniform(-30, 18, COUNT)).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        steps = x.astype(dtype).astype(np.float32)
        middles = (steps[1:] + np.roll(steps, 1)[1:]) / 2  # some are ties of both dtypes
        x = np.concatenate([x, steps, middles, [0, 65504, 65519.9, 65520, 2.0**-25, 3 * 2.0**-25]])
        x = x.astype(np.float32)
        want = x.astype(dtype).astype(np.float32)
    found = jax.jit(lambda x: rounding.round_to(x, dtype))(x)
    np.testing.assert_array_equal(found, want)


def test_nonzero_counts_subnormals():
    x = np.array([0, -0.0, 1e-45, -1e-45, 1, np.nan], np.float32)
    np.testing.assert_array_equal(
        jax.jit(rounding.is_nonzero)(x), [False, False, True, True, True, True]
    )
