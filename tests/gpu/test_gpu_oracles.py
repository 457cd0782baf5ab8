"""Whole models on a GPU against the reference logits of the checkpoints in ``tests/oracles``."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import fp4jax
from fp4jax.model import forward

pytestmark = pytest.mark.gpu

FILES = tuple(sorted((Path(__file__).parent.parent / "oracles").glob("*/oracle.safetensors")))
BOUNDS = (("float32", 1e-5), ("bfloat16", 0.02))
"""Relative errors of the logits."""
RECURRENT_BOUNDS = (("float32", 1e-4), ("bfloat16", 0.05))
"""Those of Qwen3.5, whose normed heads enlarge rounding: 2.7e-5 and, at the median position, 0.030
on a CPU, where transformers' own bf16 has 0.026 to 0.042."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_logits(file):
    oracle = load_file(file)
    ids, wanted = jnp.asarray(oracle["input_ids"], jnp.int32), oracle["logits"].astype(np.float64)
    name = file.parent.name
    recurrent = name.startswith("qwen3_5")
    for dtype, bound in RECURRENT_BOUNDS if recurrent else BOUNDS:
        model = fp4jax.load_model(file.parent, dtype=dtype, progress=False)
        lowered = jax.jit(forward, static_argnames="module").lower(model.module, model.params, ids)
        assert "xla.gpu.triton" in lowered.as_text()
        found = np.asarray(model(ids)).astype(np.float64)
        total = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        rows = np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
        print(f"{name} {dtype}: {total:.2e}, median position {np.median(rows):.2e}")
        # bf16 turns a few near ties of a random router, on any backend; those positions differ
        # altogether, the others must not.
        mixture = "moe" in name or name.startswith("nemotronh")
        by_position = dtype == "bfloat16" and (mixture or recurrent)
        assert (np.median(rows) if by_position else total) < bound, dtype
