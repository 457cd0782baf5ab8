"""Every shipped configuration of the Triton kernels lowers for CUDA, on a machine without a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from fp4jax import marlin
from fp4jax.errors import UnsupportedError
from fp4jax.ops.w4a16_grouped_matmul import w4a16_grouped_matmul
from fp4jax.ops.w4a16_grouped_matmul.triton import grouped_tile_config
from fp4jax.ops.w4a16_matmul import w4a16_matmul
from fp4jax.ops.w4a16_matmul.triton import MOST_ROWS, tile_config

KERNEL = "xla.gpu.triton"
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def lower(f, *args, platform: str = "cuda") -> str:
    # JAX from 0.11 on asks which GPU to lower for where there is none.
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def weight(shards, k: int, stack=()):
    make = functools.partial(marlin.random_weight, shards=shards, k=k, stack=stack)
    return jax.eval_shape(make, jax.random.key(0))


def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dense_configuration(dtype):
    sizes = [(n, k) for n in (301, 1024, 8192) for k in (16, 1856, 8192)]
    cases = {}
    for m in (1, 17, 33, 65, MOST_ROWS):
        for n, k in sizes:
            cases.setdefault(tile_config(m, n, k, dtype), (m, n, k))
    assert len(cases) > 5
    for m, n, k in cases.values():
        w = weight((n - 8, 8), k)
        text = lower(w4a16_matmul, shaped(m, k, dtype=dtype), w)
        assert text.count(KERNEL) == 1, (m, n, k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_grouped_configuration(dtype):
    cases = {}
    for t in (1, 8, 4000, 32768):
        for e, n, k in ((4, 388, 1856), (128, 1536, 2048), (128, 2048, 768)):
            cases.setdefault(grouped_tile_config(t, e, n, k, dtype), (t, e, n, k))
    assert len(cases) >= 3
    for t, e, n, k in cases.values():
        w = weight((n,), k, (e,))
        sizes = shaped(e, dtype=jnp.int32)
        text = lower(w4a16_grouped_matmul, shaped(t, k, dtype=dtype), w, sizes)
        assert text.count(KERNEL) == 1, (t, e, n, k)


def test_bias_leading_axes_and_result_dtype():
    w = weight((24, 40), 64)

    def f(x, w, bias):
        return w4a16_matmul(x, w, bias=bias, out_dtype=jnp.float32)

    assert KERNEL in lower(f, shaped(2, 3, 64), w, shaped(64))


def test_a_stack_of_more_than_four_gigabytes():
    w = weight((4096,), 7168, (384,))
    assert w.words.size * 2 > 2**32
    assert KERNEL in lower(w4a16_grouped_matmul, shaped(8, 7168), w, shaped(384, dtype=jnp.int32))


def test_other_platforms_and_many_rows_take_xla():
    w = weight((64,), 64)
    assert KERNEL not in lower(w4a16_matmul, shaped(4, 64), w, platform="cpu")
    assert KERNEL not in lower(w4a16_matmul, shaped(MOST_ROWS + 1, 64), w)
    forced = functools.partial(w4a16_matmul, implementation="triton")
    assert KERNEL in lower(forced, shaped(MOST_ROWS + 1, 64), w)
    with pytest.raises(UnsupportedError, match="platform is cpu"):
        lower(forced, shaped(4, 64), w, platform="cpu")
