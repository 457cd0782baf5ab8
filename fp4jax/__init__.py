"""NVFP4 (4-bit) language-model inference for JAX.

``load`` a checkpoint, ``generate`` text; weights are repacked once into immutable pytree nodes
that every compiled function takes as arguments. Names are imported on first use, so that
``import fp4jax`` costs next to nothing beyond JAX itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp4jax.generation import (
        PromptCache,
        PromptLookup,
        SamplingParams,
        batch_generate,
        generate,
        generate_tokens,
        load_prompt_cache,
        make_prompt_cache,
        pair_draft,
        save_prompt_cache,
        stream_generate,
    )
    from fp4jax.loading import load, load_draft, load_model
    from fp4jax.model import Model, engine_id
    from fp4jax.random_weights import random_model
    from fp4jax.tokenizer import Tokenizer

__version__ = "0.1.0"

_HOMES = (
    ("fp4jax.loading", ("load", "load_draft", "load_model")),
    ("fp4jax.model", ("Model", "engine_id")),
    (
        "fp4jax.generation",
        (
            "PromptCache",
            "PromptLookup",
            "SamplingParams",
            "batch_generate",
            "generate",
            "generate_tokens",
            "load_prompt_cache",
            "make_prompt_cache",
            "pair_draft",
            "save_prompt_cache",
            "stream_generate",
        ),
    ),
    ("fp4jax.random_weights", ("random_model",)),
    ("fp4jax.tokenizer", ("Tokenizer",)),
)

__all__ = [
    "Model",
    "PromptCache",
    "PromptLookup",
    "SamplingParams",
    "Tokenizer",
    "batch_generate",
    "engine_id",
    "generate",
    "generate_tokens",
    "load",
    "load_draft",
    "load_model",
    "load_prompt_cache",
    "make_prompt_cache",
    "pair_draft",
    "random_model",
    "save_prompt_cache",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES:
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'fp4jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
