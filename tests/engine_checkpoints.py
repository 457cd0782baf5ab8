"""Checkpoints of several kinds whose shapes are fixed and whose quantized values a seed decides."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from fp4jax.checkpoints.tensors import TensorFiles


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of engine.

    Attributes:
      oracle: the reference checkpoint that it is made from.
      consumers: paths of its quantized weights, those of equal layers once.
      edit: changes tensors and configuration files before values are drawn.
    """

    oracle: str
    consumers: tuple[str, ...]
    edit: Callable[[dict, Path, np.random.Generator], None] = lambda *_: None


def make_checkpoint(folder: Path, oracles: Path, kind: Kind, seed: int) -> Path:
    """A checkpoint of ``kind``; its NVFP4 codes and FP8 values are the oracle's, shuffled."""
    folder.mkdir(parents=True)
    for file in ("config.json", "hf_quant_config.json", "generation_config.json"):
        shutil.copy(oracles / kind.oracle / file, folder)
    files = TensorFiles.open(oracles / kind.oracle)
    tensors = {key: files.read(key) for key in files.names()}
    rng = np.random.default_rng(seed)
    kind.edit(tensors, folder, rng)
    for key, value in tensors.items():
        if key.endswith(".weight") and value.dtype in (np.uint8, ml_dtypes.float8_e4m3fn):
            tensors[key] = rng.permutation(value.reshape(-1)).reshape(value.shape)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _quantize_head(tensors: dict, folder: Path, rng: np.random.Generator) -> None:
    """Puts a random NVFP4 matrix in place of the output head."""
    n, k = tensors["lm_head.weight"].shape
    tensors["lm_head.weight"] = rng.integers(0, 256, (n, k // 2), np.uint8)
    scale = rng.uniform(0.5, 2, (n, k // 16)).astype(ml_dtypes.float8_e4m3fn)
    tensors["lm_head.weight_scale"] = scale
    tensors["lm_head.weight_scale_2"] = np.asarray(0.02, np.float32)
    quant = json.loads((folder / "hf_quant_config.json").read_text())
    quant["quantization"]["exclude_modules"].remove("lm_head")
    (folder / "hf_quant_config.json").write_text(json.dumps(quant))


def _tie_head(tensors: dict, folder: Path, rng: np.random.Generator) -> None:
    """Makes the quantized output head the embedding, too."""
    del rng, tensors["model.embed_tokens.weight"]
    for leaf in ("weight", "weight_scale", "weight_scale_2"):
        tensors[f"model.embed_tokens.{leaf}"] = tensors.pop(f"lm_head.{leaf}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


ATTENTION = ("self_attn/o_proj", "self_attn/qkv_proj")
MLP = ("mlp/down_proj", "mlp/gate_up_proj")

EXPERTS = Kind("qwen3moe-modelopt", ("lm_head", *MLP, *ATTENTION), _quantize_head)
TIED = Kind("llama-lmhead-modelopt", ("embed_tokens", *MLP, *ATTENTION), _tie_head)
DELTA = Kind(
    "qwen3_5moe-modelopt-mixed",
    (
        *("linear_attn/in_proj_qkvz", "linear_attn/out_proj", "lm_head"),
        *("mlp/routed/down_proj", "mlp/routed/gate_up_proj"),
        *("mlp/shared_expert/down_proj", "mlp/shared_expert/gate_up_proj"),
        *ATTENTION,
    ),
)
KINDS = MappingProxyType({"experts": EXPERTS, "tied": TIED, "delta": DELTA})
"""Plain and fused linears, experts, heads free and tied; recurrent layers and FP8 linears."""
