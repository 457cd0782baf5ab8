"""Writes the checkpoints of this folder and their reference logits; needs torch and transformers.

``python make_reference.py`` was run with transformers 5.24.0 and torch 2.13.0 on a CPU. Random
unquantized models with recurrent layers, of sizes that the quantized reference checkpoints leave
out; 80 tokens are more than one chunk of the recurrence. Each folder gets ``config.json``,
``model.safetensors`` and ``reference.safetensors``: ``input_ids`` i32 [2, 80], ``logits`` f32
[2, 80, V] and ``greedy_ids`` i32 [2, 8], computed in f32 from the stored values with eager
attention and no cache. Experts are stored stacked, as the models hold them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
TOKENS, NEW_TOKENS = 80, 8
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_hidden_layers": 3,
}


def rope(factor):
    return {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": factor,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    }


def models():
    """(folder, config, dtype of the stored weights)."""
    yield (
        "qwen3_5-narrow-tied",
        transformers.Qwen3_5TextConfig(
            **SIZES,
            intermediate_size=96,
            num_key_value_heads=2,
            linear_num_key_heads=3,
            linear_num_value_heads=3,
            linear_key_head_dim=8,
            linear_value_head_dim=24,
            linear_conv_kernel_dim=2,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            tie_word_embeddings=True,
            attention_bias=True,
            rope_parameters=rope(0.5),
        ),
        torch.float16,
    )
    yield (
        "qwen3_5-many-values",
        transformers.Qwen3_5TextConfig(
            **SIZES,
            intermediate_size=80,
            num_key_value_heads=1,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=16,
            linear_value_head_dim=8,
            linear_conv_kernel_dim=4,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            rope_parameters=rope(0.25),
        ),
        torch.bfloat16,
    )
    yield (
        "qwen3_5moe-stacked",
        transformers.Qwen3_5MoeTextConfig(
            **SIZES,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=48,
            num_experts=5,
            num_experts_per_tok=2,
            num_key_value_heads=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=12,
            linear_value_head_dim=16,
            linear_conv_kernel_dim=3,
            layer_types=["linear_attention", "linear_attention", "full_attention"],
            rope_parameters=rope(1.0),
        ),
        torch.bfloat16,
    )


def randomize(model, generator, dtype):
    """Weights, exact in ``dtype``: activations near 1; norms, biases, decays not trivial."""
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("linear_attn.norm.weight"):
            noise = 1 + 0.2 * noise
        elif "norm" in name:  # added to 1
            noise = 0.2 * noise
        elif name.endswith("A_log"):
            noise = torch.log(0.01 + 16 * torch.rand(value.shape, generator=generator))
        elif name.endswith("dt_bias"):
            noise = noise - 2
        elif name.endswith("bias"):
            noise = 0.5 * noise
        elif "embed" in name:
            noise = 0.1 * noise  # or a tied head would only repeat the last token
        else:
            noise = noise * value.shape[-1] ** -0.5
        value.data = noise.to(dtype).to(torch.float32)


def greedy(model, ids):
    """Ids of the likeliest continuation, and the smallest gap to the second likeliest."""
    gap = float("inf")
    for _ in range(NEW_TOKENS):
        logits = model(ids, use_cache=False).logits[:, -1]
        best = logits.topk(2).values
        gap = min(gap, float((best[:, 0] - best[:, 1]).min()))
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids[:, TOKENS:].to(torch.int32).contiguous(), gap


def main():
    torch.set_num_threads(1)
    for seed, (folder, config, dtype) in enumerate(models()):
        generator = torch.Generator().manual_seed(seed)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomize(model, generator, dtype)
        model.tie_weights()
        path = HERE / folder
        shutil.rmtree(path, ignore_errors=True)
        config.architectures = [type(model).__name__]
        config.save_pretrained(path)
        stored = {name: value.to(dtype) for name, value in model.state_dict().items()}
        if config.tie_word_embeddings:
            del stored["lm_head.weight"]
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
        model.eval()
        ids = torch.randint(0, config.vocab_size, (2, TOKENS), generator=generator)
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
            following, gap = greedy(model, ids)
        reference = {
            "input_ids": ids.to(torch.int32),
            "logits": logits.contiguous(),
            "greedy_ids": following,
        }
        save_file(reference, path / "reference.safetensors")
        print(folder, sum(f.stat().st_size for f in path.iterdir()), float(logits.abs().max()), gap)


if __name__ == "__main__":
    main()
