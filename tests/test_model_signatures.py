"""The written shapes and dtypes hold on every call from a load to a generated token.

As in ``generation/test_signatures.py``, functions are wrapped one by one. Methods of Flax modules
are wrapped inside Flax's own wrapper.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped
from safetensors.numpy import load_file

import fp4jax
from fp4jax import marlin, nvfp4
from fp4jax.layers.norms import RMSNorm

NUMERIC = ("fp4jax.nvfp4", "fp4jax.marlin", "fp4jax.checksums", "fp4jax.model", "fp4jax.ops.",
           "fp4jax.layers.", "fp4jax.models.")  # fmt: skip
UNCHECKED = ("fp4jax.ops.dispatch",)
"""Takes names and descriptions, hardly an array."""


def modules() -> list:
    """Every module of the package that can be imported without an accelerator."""
    names = [info.name for info in pkgutil.walk_packages(fp4jax.__path__, "fp4jax.")]
    return [importlib.import_module(n) for n in names if not n.endswith("__main__")]


def is_numeric(name: str | None) -> bool:
    return bool(name) and name.startswith(NUMERIC) and not name.startswith(UNCHECKED)


@pytest.fixture
def checked(monkeypatch):
    """Checks around every numeric function and module method; gives the names that were called."""
    called: set[str] = set()
    wrapped: dict = {}  # fp4jax: allow ES001 (one test's own, gone with it)

    def wrap(function, name: str):
        """``function`` with checks that also notes that it was called."""

        def noting(*args, **kwargs):
            called.add(name)
            if function not in wrapped:  # made once it is needed: making them all takes seconds
                wrapped[function] = jaxtyped(function, typechecker=beartype)
            return wrapped[function](*args, **kwargs)

        return noting

    for module in modules():
        for name, found in list(vars(module).items()):
            if inspect.isfunction(found) and is_numeric(found.__module__):
                monkeypatch.setattr(module, name, wrap(found, name))
            owned = inspect.isclass(found) and found.__module__ == module.__name__
            if owned and issubclass(found, nn.Module) and is_numeric(module.__name__):
                for method in ("__call__", "logits", "attend"):
                    own = vars(found).get(method)
                    if own is not None:
                        plain = inspect.unwrap(own)
                        noting = wrap(plain, f"{name}.{method}")
                        noting.__name__ = method
                        if hasattr(plain, "compact"):
                            noting.compact = plain.compact
                        monkeypatch.setattr(found, method, nn.module.wrap_method_once(noting))
    return called


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("llama-odd-modelopt", "bfloat16", 0.02),
        ("qwen3moe-ct", "float32", 1e-5),
        ("qwen3_5moe-ct", "float32", 1e-4),
    ],
)
def test_load_forward_generate(oracles, checked, name, dtype, tolerance):
    folder = oracles / name
    model = fp4jax.load_model(folder, dtype=dtype, progress=False)
    oracle = load_file(folder / "oracle.safetensors")
    # Shapes of its own, so that nothing compiled earlier stands in.
    ids = oracle["input_ids"][:, :19]
    logits = np.asarray(model(ids))
    expected = oracle["logits"][:, :19]
    assert np.linalg.norm(logits - expected) < tolerance * np.linalg.norm(expected)
    prompts = [ids[0].tolist(), ids[1, :5].tolist(), ids[1].tolist()]
    result = fp4jax.batch_generate(model, None, prompts, max_tokens=3, ignore_eos=True)
    assert [len(tokens) for tokens in result.tokens] == [3, 3, 3]
    assert {"w4a16_matmul", "matmul_xla", "attention", "attention_xla", "apply_rope", "embed",
            "inverse_frequencies"} <= checked  # fmt: skip
    assert {"RMSNorm.__call__", "Attention.__call__", "FusedLinear.__call__", "Linear.__call__",
            "Embedding.__call__", "DecoderModel.__call__", "DecoderModel.logits",
            "DecoderBlock.__call__"} <= checked  # fmt: skip
    if name == "qwen3_5moe-ct":
        assert {"causal_conv1d", "causal_conv1d_xla", "gated_delta_rule", "gated_delta_rule_step",
                "gated_delta_rule_chunked", "inverse_of_unit_lower", "unit_length",
                "GatedDeltaNet.__call__"} <= checked  # fmt: skip
    if "moe" in name:
        assert {"w4a16_grouped_matmul", "route", "sort_by_expert", "SparseMoE.__call__",
                "ExpertLinear.__call__"} <= checked  # fmt: skip


def random_nvfp4(rows, k: int, stack=()) -> list[nvfp4.NVFP4Weight]:
    rng = np.random.default_rng(0)
    return [
        nvfp4.NVFP4Weight(
            jnp.asarray(rng.integers(0, 256, (*stack, n, k // 2), np.uint8)),
            jnp.asarray(rng.uniform(0.5, 2, (*stack, n, k // 16)).astype(jnp.float8_e4m3fn)),
            jnp.full(stack, 0.1, jnp.float32),
        )
        for n in rows
    ]


@pytest.mark.parametrize("stack", [(), (3,)])
def test_the_weight_from_end_to_end(checked, stack):
    weights = random_nvfp4((5, 11), 48, stack)
    repacked = marlin.repack(weights)
    for weight, again in zip(weights, marlin.unpack(repacked), strict=True):
        np.testing.assert_array_equal(np.asarray(weight.packed), np.asarray(again.packed))
        assert nvfp4.dequantize(weight).shape == (*stack, weight.n, 48)
    assert marlin.decode(repacked).shape == (*stack, 16, 48)
    assert {"repack", "unpack", "dequantize", "decode", "decode_e2m1", "unpack_codes",
            "encode_scale", "decode_scale", "checksum", "combine_checksums"} <= checked  # fmt: skip


def test_the_checks_are_live(checked):
    x = jnp.ones((2, 3, 48))
    weight = marlin.repack(random_nvfp4((8,), 48))
    stack = marlin.repack(random_nvfp4((8,), 48, (3,)))
    ops = (importlib.import_module(f"fp4jax.ops.{name}") for name in
           ("attention", "w4a16_matmul", "w4a16_grouped_matmul"))  # fmt: skip
    attention, matmul, grouped = ops
    for call in (
        lambda: attention.attention(x, x, x, jnp.zeros((2, 3), jnp.int32)),
        lambda: attention.attention(x[..., None], x[..., None], x[..., None], jnp.zeros((2, 3))),
        lambda: nvfp4.unpack_codes(jnp.zeros((2, 8), jnp.int32)),
        lambda: marlin.decode_scale(jnp.zeros(3)),
        lambda: matmul.w4a16_matmul(jnp.ones((2, 48), jnp.int32), weight),
        lambda: matmul.w4a16_matmul(x, weight, bias=jnp.zeros((8, 1))),
        lambda: grouped.w4a16_grouped_matmul(x[0], stack, jnp.zeros(3)),
        lambda: RMSNorm().apply({"params": {"weight": jnp.ones(4)}}, jnp.ones((2, 4), jnp.int32)),
    ):
        with pytest.raises(TypeCheckError):
            call()
    matmul.w4a16_matmul(x, weight, bias=jnp.zeros(8))
    grouped.w4a16_grouped_matmul(x[0], stack, jnp.asarray([1, 0, 2], jnp.int32))
