"""A GGUF file of a Llama model with a byte-level tokenizer, as a Hugging Face checkpoint in bf16.

This serves the demo model and knows no more than that needs. The file format and the names in it:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Reading and decoding its blocks is left
to the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import tokenizers
from jaxtyping import Float32
from tokenizers import decoders, models, pre_tokenizers

from fp4jax.checkpoints.hf_config import CONFIG_NAME, GENERATION_CONFIG_NAME
from fp4jax.checkpoints.output import SHARD_BYTES, ShardWriter, write_json
from fp4jax.errors import CheckpointError, UnsupportedError
from fp4jax.progress import Progress
from fp4jax.tokenizer import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME

if TYPE_CHECKING:
    from gguf import GGUFReader

GLOBAL_NAMES = (
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
)
LAYER_NAMES = (
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
)
"""Modules, as GGUF and as Hugging Face name them."""

CONTROL = 3
"""Type of a special token in ``tokenizer.ggml.token_type``."""


def convert_gguf_llama(file: Path, folder: Path, progress: Progress | None = None) -> None:
    """Writes the model in ``file`` into ``folder``: config, bf16 weights, tokenizer.

    Args:
      file: a GGUF file with architecture "llama" and the "smollm" byte-level tokenizer.
      folder: an empty folder.
      progress: called as ``progress("convert", done, total)``, in bytes of the file.

    Raises:
      CheckpointError: the file is missing or damaged, or the ``gguf`` package is not installed.
      UnsupportedError: another architecture or tokenizer.
    """
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            "reading GGUF files needs the package gguf: pip install 'fp4jax[demo]'"
        ) from error
    try:
        reader = gguf.GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"{file}: not readable as GGUF ({error}); install it again"
        ) from error
    _check_kind(file, reader)
    config = _config(file, reader)
    write_json(folder / CONFIG_NAME, config)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / GENERATION_CONFIG_NAME, ids)
    _write_tokenizer(file, reader, folder, ids)
    writer = ShardWriter(folder, SHARD_BYTES)
    total, done = sum(int(tensor.n_bytes) for tensor in reader.tensors), 0
    for name, value, size in _tensors(file, reader, config):
        writer.add({name: value})
        done += size
        if progress is not None:
            progress("convert", done, total)
    writer.close()


def _field(file: Path, reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise CheckpointError(f"{file}: has no field {name}")
    return field.contents()


def _check_kind(file: Path, reader: GGUFReader) -> None:
    wanted = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for name, value in wanted.items():
        found = _field(file, reader, name)
        if found != value:
            raise UnsupportedError(f"{file}: {name} is {found!r}; only {value!r} can be converted")


def _config(file: Path, reader: GGUFReader) -> dict[str, Any]:
    def llama(name: str) -> Any:
        return _field(file, reader, f"llama.{name}")

    def token(name: str) -> int:
        return int(_field(file, reader, f"tokenizer.ggml.{name}_token_id"))

    hidden, heads = llama("embedding_length"), llama("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_field(file, reader, "tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": llama("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": llama("context_length"),
        "rope_theta": llama("rope.freq_base"),
        # Stored as f32: 1e-5 comes back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{llama('attention.layer_norm_rms_epsilon'):.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(t.name != "output.weight" for t in reader.tensors),
        "bos_token_id": token("bos"),
        "eos_token_id": token("eos"),
        "pad_token_id": token("padding"),
        "torch_dtype": "bfloat16",
    }


def _tensors(
    file: Path, reader: GGUFReader, config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray, int]]:
    """Name, bf16 value and stored bytes of each tensor."""
    from gguf.quants import dequantize

    names = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in GLOBAL_NAMES}
    for i in range(config["num_hidden_layers"]):
        for theirs, ours in LAYER_NAMES:
            names[f"blk.{i}.{theirs}.weight"] = f"model.layers.{i}.{ours}.weight"
    for tensor in reader.tensors:
        if tensor.name not in names:
            raise UnsupportedError(f"{file}: {tensor.name} is no tensor of a Llama model")
        value = dequantize(tensor.data, tensor.tensor_type)
        for leaf, heads in (
            ("attn_q", config["num_attention_heads"]),
            ("attn_k", config["num_key_value_heads"]),
        ):
            if f".{leaf}." in tensor.name:
                value = split_halves(value, heads)
        yield names[tensor.name], value.astype(ml_dtypes.bfloat16), int(tensor.n_bytes)


def split_halves(rows: Float32[np.ndarray, "n k"], heads: int) -> Float32[np.ndarray, "n k"]:
    """Undoes GGUF's order of query and key rows.

    GGUF keeps the two numbers that a rotation mixes side by side, as the original Llama does;
    Hugging Face keeps them half a head apart.
    """
    n, k = rows.shape
    return rows.reshape(heads, n // heads // 2, 2, k).swapaxes(1, 2).reshape(n, k)


def _write_tokenizer(file: Path, reader: GGUFReader, folder: Path, ids: dict[str, int]) -> None:
    tokens = _field(file, reader, "tokenizer.ggml.tokens")
    kinds = _field(file, reader, "tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in _field(file, reader, "tokenizer.ggml.merges")]
    try:
        model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file}: its tokenizer is damaged ({error})") from error
    backend = tokenizers.Tokenizer(model)
    # What the kind "smollm" stands for: every digit alone, then GPT-2's own pattern.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    )
    backend.save(str(folder / TOKENIZER_NAME))
    named = {name.removesuffix("_id"): tokens[i] for name, i in ids.items()}
    unknown = _field(file, reader, "tokenizer.ggml.unknown_token_id")
    write_json(
        folder / TOKENIZER_CONFIG_NAME,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
            "unk_token": tokens[unknown],
            "model_max_length": _field(file, reader, "llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": _field(file, reader, "tokenizer.chat_template"),
        },
    )
