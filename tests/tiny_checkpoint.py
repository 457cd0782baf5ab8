"""A tiny checkpoint with a tokenizer and a chat template, for tests of whole calls."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from fp4jax.checkpoints.tensors import TensorFiles

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def add_tokenizer(folder: Path, *, chat: bool = True) -> None:
    """Byte-level BPE without merges: one id a byte, then beginning and end of sequence."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    if chat:
        config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def copy_oracle(oracles: Path, name: str, folder: Path) -> Path:
    """The files of a reference checkpoint, without its reference outputs."""
    folder.mkdir(parents=True)
    for file in (oracles / name).iterdir():
        if not file.name.startswith("oracle."):
            shutil.copy(file, folder)
    return folder


def make_unquantized(oracles: Path, folder: Path) -> Path:
    """A random bf16 Llama of the reference checkpoint's sizes, with a tokenizer."""
    source = TensorFiles.open(oracles / "llama-modelopt")
    folder.mkdir(parents=True)
    config = json.loads((oracles / "llama-modelopt" / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    rng, tensors = np.random.default_rng(0), {}
    for name in source.names():
        info = source.info(name)
        if name.endswith(("_scale", "_scale_2")):
            continue
        shape = info.shape
        if info.dtype == np.uint8:
            shape = (shape[0], 2 * shape[1])
        value = rng.standard_normal(shape) * (0.05 if len(shape) > 1 else 0.1)
        tensors[name] = (value + (len(shape) == 1)).astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    add_tokenizer(folder)
    return folder
