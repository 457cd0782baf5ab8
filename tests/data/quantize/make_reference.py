"""Writes tiny unquantized checkpoints, and what two other quantizers make of them.

``<model>/source`` is written by transformers, ``<model>/modelopt`` by nvidia-modelopt's
W4A16_NVFP4 recipe and export, ``<model>/compressed-tensors`` by llmcompressor's NVFP4A16 scheme.
The files here come from transformers 5.24.0, nvidia-modelopt 0.47.0, llmcompressor 0.14.0.1,
compressed-tensors 0.20.1 and torch 2.13.0 on a CPU. With those installed::

    python tests/data/quantize/make_reference.py
"""

from __future__ import annotations

from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
import transformers
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from modelopt.torch.export import export_hf_checkpoint

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def main():
    configs = {
        "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
        "qwen3moe": transformers.Qwen3MoeConfig(
            **SIZES,
            moe_intermediate_size=16,
            num_experts=3,
            num_experts_per_tok=2,
            tie_word_embeddings=True,
        ),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
            else:  # so that q, k and v, say, differ in their largest value
                parameter.data *= 0.5 + 3 * torch.rand(())
        source = HERE / name / "source"
        model.save_pretrained(source)

        quantized = mtq.quantize(model, mtq.W4A16_NVFP4_CFG, forward_loop=None)
        export_hf_checkpoint(quantized, dtype=torch.bfloat16, export_dir=HERE / name / "modelopt")

        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        ignore = ["lm_head", "re:.*mlp.gate$"]
        recipe = QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=ignore)
        oneshot(model=model, recipe=recipe)
        model.save_pretrained(HERE / name / "compressed-tensors", save_compressed=True)


if __name__ == "__main__":
    main()
