"""Strict dtype promotion for everything in this folder, and the toy engine."""

from __future__ import annotations

import jax
import pytest
from generation_toy import ToyModel, ToyTokenizer, make_toy


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="session")
def toy() -> ToyModel:
    return make_toy(seed=0)


@pytest.fixture(scope="session")
def tokenizer() -> ToyTokenizer:
    return ToyTokenizer()
