"""The toy engine."""

from __future__ import annotations

import pytest
from generation_toy import ToyModel, ToyTokenizer, make_toy


@pytest.fixture(scope="session")
def toy() -> ToyModel:
    return make_toy(seed=0)


@pytest.fixture(scope="session")
def tokenizer() -> ToyTokenizer:
    return ToyTokenizer()
