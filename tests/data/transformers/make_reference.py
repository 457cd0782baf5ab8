"""Writes the checkpoints of this folder and their reference logits; needs torch and transformers.

``python make_reference.py`` was run with transformers 5.24.0 and torch 2.13.0 on a CPU. Random
unquantized models that cover what the quantized reference checkpoints leave out. Each folder gets
``config.json``, ``model.safetensors`` and ``reference.safetensors``: ``input_ids`` i32 [2, 40],
``logits`` f32 [2, 40, V] and ``greedy_ids`` i32 [2, 8], computed in f32 from the stored values
with eager attention and no cache. ``rope.json`` holds rotary frequencies.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def models():
    """(folder, config, dtype of the stored weights)."""
    yield (
        "llama-llama3-bias",
        transformers.LlamaConfig(
            **SIZES,
            num_hidden_layers=2,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        torch.bfloat16,
    )
    yield (
        "llama-yarn-tied",
        transformers.LlamaConfig(
            **{**SIZES, "num_key_value_heads": 1, "head_dim": 24},
            num_hidden_layers=2,
            tie_word_embeddings=True,
            eos_token_id=[3, 5],
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        ),
        torch.float16,
    )
    yield (
        "qwen3-window",
        transformers.Qwen3Config(
            **SIZES,
            num_hidden_layers=3,
            attention_bias=True,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=6,
            max_window_layers=1,
        ),
        torch.bfloat16,
    )
    yield (
        "qwen3moe-sparse",
        transformers.Qwen3MoeConfig(
            **{**SIZES, "intermediate_size": 64},
            num_hidden_layers=4,
            moe_intermediate_size=16,
            num_experts=5,
            num_experts_per_tok=2,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            use_sliding_window=True,
            sliding_window=9,
        ),
        torch.bfloat16,
    )


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = (  # fp4jax: allow ES001 (a constant table of JSON)
    {"rope_type": "default", "rope_theta": 1000000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    {**LLAMA3, "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192},
    {**LLAMA3, "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 512},
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24,
        "beta_slow": 2,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": None,
        "original_max_position_embeddings": 16384,
        "attention_factor": 1.25,
    },
)
"""Rotary scalings as ``rope_parameters`` spells them."""


def rope_reference():
    """Frequencies and attention factor of each of ``ROPES``."""
    found = []
    for rope in ROPES:
        config = transformers.LlamaConfig(
            hidden_size=256,
            num_attention_heads=4,
            head_dim=64,
            max_position_embeddings=131072,
            rope_parameters=dict(rope),
        )
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        found.append(
            {
                "rope_parameters": rope,
                "inv_freq": rotary.inv_freq.tolist(),
                "attention_factor": rotary.attention_scaling,
            }
        )
    return {"max_position_embeddings": 131072, "head_dim": 64, "cases": found}


def randomize(model, generator, dtype):
    """Weights, exact in ``dtype``: activations stay near 1, norms and biases are not trivial."""
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if "norm" in name:
            noise = 1 + 0.2 * noise
        elif name.endswith("bias"):
            noise = 0.5 * noise
        elif "embed" not in name:
            noise = noise * value.shape[-1] ** -0.5
        value.data = noise.to(dtype).to(torch.float32)


def main():
    torch.set_num_threads(1)
    (HERE / "rope.json").write_text(json.dumps(rope_reference(), indent=1) + "\n")
    for seed, (folder, config, dtype) in enumerate(models()):
        generator = torch.Generator().manual_seed(seed)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomize(model, generator, dtype)
        model.tie_weights()
        path = HERE / folder
        shutil.rmtree(path, ignore_errors=True)
        copy.deepcopy(model).to(dtype).save_pretrained(path)
        (path / "generation_config.json").unlink(missing_ok=True)
        model.eval()
        ids = torch.randint(0, config.vocab_size, (2, 40), generator=generator)
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
            longer = ids
            for _ in range(8):
                following = model(longer, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
                longer = torch.cat([longer, following], dim=1)
        reference = {
            "input_ids": ids.to(torch.int32),
            "logits": logits.contiguous(),
            "greedy_ids": longer[:, ids.shape[1] :].to(torch.int32).contiguous(),
        }
        save_file(reference, path / "reference.safetensors")
        print(folder, sum(f.stat().st_size for f in path.iterdir()), float(logits.abs().max()))


if __name__ == "__main__":
    main()
