"""Small random drafters, described by their configs; the values follow from a seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

PIECES = (9, 1, 4, 2)
"""Context tokens that come before each of the proposals."""

ANCHORS = (5, 3, 41, 17)
"""The token that each of the proposals follows."""

NAMES = ("full", "sliding", "symmetric", "causal", "second", "second-wide", "second-causal")
"""The cases."""


def config_of(name: str) -> dict[str, Any]:
    """Contents of the ``config.json`` of a case."""
    cases: dict[str, dict[str, Any]] = {
        "full": {},
        "sliding": _sliding(7, "sliding", "full", "sliding"),
        "symmetric": {**_sliding(4, "sliding", "sliding"), "is_causal": False},
        "causal": {
            "is_causal": True,
            "attention_bias": True,
            "num_key_value_heads": 4,
            "rope_parameters": {
                "rope_theta": 1e4,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "dflash_config": {
                "mask_token_id": 7,
                "target_layer_ids": [4],
                "block_size": 5,
                "output_multiplier": 0.5,
                "final_logit_softcapping": 1.5,
                "input_embedding_scale": 3.0,
            },
        },
        "second": {
            **_sliding(8, "sliding", "sliding"),
            "is_causal": False,
            **_second(
                conv_kernel_size=2,
                conv_group_size=8,
                selector_rank=6,
                selector_top_k=4,
                output_multiplier=0.7,
                final_logit_softcapping=2.0,
            ),
        },
        "second-wide": _second(
            block_size=8, conv_kernel_size=3, conv_group_size=4, selector_rank=16, selector_top_k=11
        ),
        "second-causal": {
            **_sliding(5, "full", "sliding"),
            **_second(conv_kernel_size=4, conv_group_size=32, selector_rank=3, selector_top_k=56),
        },
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": 56,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "num_target_layers": 6,
        "block_size": 6,  # as in earlier checkpoints, at the top level
        "dflash_config": {"mask_token_id": 55, "target_layer_ids": [1, 3]},
        **cases[name],
    }


def _sliding(window: int, *kinds: str) -> dict[str, Any]:
    return {
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "num_hidden_layers": len(kinds),
        "sliding_window": window,
        "use_sliding_window": True,
    }


def _second(**own: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 2, 4], **own},
    }


def tensors_of(hf: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """f32 tensors of a drafter, by the names and shapes of the public checkpoints."""
    own = hf["dflash_config"]
    h, f, vocab, d = (
        hf[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    )
    q, kv = d * hf["num_attention_heads"], d * hf["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, len(own["target_layer_ids"]) * h)}
    shapes |= {"hidden_norm.weight": (h,), "norm.weight": (h,)}
    second = "conv_kernel_size" in own
    for i in range(hf["num_hidden_layers"]):
        here = f"layers.{i}"
        attention = {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q)}
        for name, shape in attention.items():
            shapes[f"{here}.self_attn.{name}.weight"] = shape
            if hf.get("attention_bias"):
                shapes[f"{here}.self_attn.{name}.bias"] = shape[:1]
        shapes |= {f"{here}.self_attn.{n}.weight": (d,) for n in ("q_norm", "k_norm")}
        shapes |= {f"{here}.{n}_layernorm.weight": (h,) for n in ("input", "post_attention")}
        shapes |= {f"{here}.mlp.{n}_proj.weight": (f, h) for n in ("gate", "up")}
        shapes[f"{here}.mlp.down_proj.weight"] = (h, f)
        for name in ("attention_conv", "mlp_conv") if second else ():
            taps, groups = own["conv_kernel_size"], h // own["conv_group_size"]
            shapes[f"{here}.{name}.base_kernel"] = (2, taps, h)
            shapes[f"{here}.{name}.kernel_projection.weight"] = (2 * taps * groups, h)
    if second:
        rank, selector = own["selector_rank"], "candidate_selector"
        shapes[f"{selector}.predecessor_codebook"] = (vocab, rank)
        shapes[f"{selector}.successor_codebook"] = (vocab, rank)
        shapes[f"{selector}.hidden_projection.weight"] = (rank, h)
    rng = np.random.default_rng(len(shapes))
    return {name: _values(rng, name, shape) for name, shape in sorted(shapes.items())}


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 1 + 0.2 * values
    elif len(shape) == 2 and "codebook" not in name:
        values *= 1.5 * shape[1] ** -0.5
    elif name.endswith(".bias"):
        values *= 0.3
    return values.astype(np.float32)


def write_drafter(folder: Path, name: str) -> Path:
    """A checkpoint folder of case ``name``."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(name)))
    save_file(tensors_of(config_of(name)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def target_of(hf: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What a drafter takes from its target: ``embed`` and ``head`` [V, H], ``taps`` [T, n, H]."""
    own = hf["dflash_config"]
    rng, vocab, h = np.random.default_rng(7), hf["vocab_size"], hf["hidden_size"]
    return {
        "embed": rng.standard_normal((vocab, h)).astype(np.float32),
        "head": (2 * rng.standard_normal((vocab, h)) * h**-0.5).astype(np.float32),
        "taps": rng.standard_normal((sum(PIECES), len(own["target_layer_ids"]), h)).astype(
            np.float32
        ),
    }
