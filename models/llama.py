"""Llama 2, 3, 3.1 and 3.2 text models, and models of the same shape such as SmolLM2.

arXiv 2302.13971 and 2407.21783; names as in Hugging Face ``LlamaForCausalLM``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp4jax.architecture import Architecture
from fp4jax.checkpoints.hf_config import decoder_fields
from fp4jax.layers.decoder import DecoderConfig, DecoderModel, decoder_keys


class Llama(DecoderModel):
    """Pre-norm attention and SwiGLU blocks, exactly the shared frame."""


def llama_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """The sizes in a ``config.json``."""
    return DecoderConfig(**decoder_fields(hf))


ARCHITECTURE = Architecture(
    name="LlamaForCausalLM", config=llama_config, model=Llama, keys=decoder_keys
)
