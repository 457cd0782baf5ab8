"""Writes the checkpoints of this folder and their reference logits; needs torch and transformers.

``python make_reference.py`` was run with transformers 5.25.0 and torch 2.13.0 on a CPU. Random
unquantized models of sizes that the quantized reference checkpoints leave out; 80 tokens are more
than one chunk of the recurrence. Each folder gets ``config.json``, ``model.safetensors`` and
``reference.safetensors``: ``input_ids`` i32 [2, 80], ``logits`` f32 [2, 80, V] and ``greedy_ids``
i32 [2, 8], computed in f32 from the stored values with eager attention and no cache. Two folders
have the names of public checkpoints (``backbone.``, experts one by one), one has those of the
module (``model.``, experts stacked).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
TOKENS, NEW_TOKENS = 80, 8
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rescale_prenorm_residual": False,
}


def models():
    """(folder, config, dtype of the stored weights, what config.json says otherwise, public)."""
    yield (
        "limits-mlp",
        transformers.NemotronHConfig(
            **SIZES,
            hybrid_override_pattern="M*-MM",
            head_dim=16,
            num_key_value_heads=1,
            intermediate_size=80,
            mamba_num_heads=6,
            mamba_head_dim=8,
            n_groups=3,
            ssm_state_size=12,
            conv_kernel=4,
            chunk_size=16,
            time_step_limit=(0.05, 0.6),
        ),
        torch.bfloat16,
        {"hybrid_override_pattern": "M*-MM", "layers_block_type": None},
        True,
    )
    yield (
        "latent-grouped",
        transformers.NemotronHConfig(
            **SIZES,
            layers_block_type=["moe", "linear_attention", "full_attention", "moe"],
            head_dim=12,
            num_key_value_heads=4,
            mlp_bias=True,
            mamba_num_heads=4,
            mamba_head_dim=16,
            n_groups=1,
            ssm_state_size=16,
            conv_kernel=2,
            use_conv_bias=False,
            use_bias=True,
            chunk_size=7,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            moe_intermediate_size=20,
            moe_latent_size=24,
            moe_shared_expert_intermediate_size=40,
        ),
        torch.bfloat16,
        {},
        False,
    )
    yield (
        "tied-one-head-a-group",
        transformers.NemotronHConfig(
            **SIZES,
            layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention"],
            head_dim=8,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            mamba_num_heads=5,
            mamba_head_dim=12,
            n_groups=5,
            ssm_state_size=8,
            conv_kernel=3,
            chunk_size=256,
            n_routed_experts=6,
            num_experts_per_tok=2,
            routed_scaling_factor=2.5,
            moe_intermediate_size=16,
            moe_shared_expert_intermediate_size=32,
        ),
        torch.float16,
        {"layers_block_type": ["mamba", "moe", "attention", "mamba"]},
        True,
    )


def randomize(model, generator, dtype):
    """Weights, exact in ``dtype``: activations near 1; norms, biases, decays not trivial."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        noise = torch.randn(value.shape, generator=generator)
        if "norm" in name or name.endswith(".D"):
            noise = 1 + 0.2 * noise
        elif name.endswith("A_log"):
            noise = torch.log(0.01 + 16 * torch.rand(value.shape, generator=generator))
        elif name.endswith("dt_bias"):
            noise = noise - 2
        elif name.endswith("bias"):
            noise = 0.3 * noise
        elif "embeddings" in name:
            noise = 0.1 * noise  # or a tied head would only repeat the last token
        else:
            noise = noise * value.shape[-1] ** -0.5
        value.data = noise.to(dtype).to(torch.float32)


def public_names(tensors):
    """As public checkpoints name the tensors, experts one by one."""
    found = {}
    for name, value in tensors.items():
        name = name.replace("model.", "backbone.", 1)
        if ".experts." in name:
            parent, leaf = name.rsplit(".", 1)
            for expert, matrix in enumerate(value):
                found[f"{parent}.{expert}.{leaf}.weight"] = matrix.contiguous()
        else:
            found[name] = value
    return found


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
    for seed, (folder, config, dtype, said, public) in enumerate(models()):
        generator = torch.Generator().manual_seed(seed)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomize(model, generator, dtype)
        stored = {name: value.to(dtype) for name, value in model.state_dict().items()}
        if config.tie_word_embeddings:  # transformers 5.25 leaves this model's head alone
            model.lm_head.weight = model.model.embeddings.weight
            del stored["lm_head.weight"]
        path = HERE / folder
        shutil.rmtree(path, ignore_errors=True)
        config.architectures = [type(model).__name__]
        config.save_pretrained(path)
        stated = {**json.loads((path / "config.json").read_text()), **said}
        stated = {key: value for key, value in stated.items() if value is not None}
        (path / "config.json").write_text(json.dumps(stated, indent=2) + "\n")
        stored = public_names(stored) if public else stored
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
