"""Writes ``reference.json``: what other tools make of the demo model's GGUF file.

- ``texts``: token ids by GGUF's own definition of the tokenizer kind "smollm", written out here:
  two regular expressions and byte-pair merges by rank. (transformers 5.24.0 gives the same ids
  from the GGUF file, except that it does not split digits outside ASCII.)
- ``digests``: SHA-256 of some tensors as transformers reads them from the file, in bfloat16.
- ``greedy``: the answer of transformers in float32 with the linear layers of the NVFP4 checkpoint
  dequantized, and the smallest gap between its two largest logits.

Run with ``torch``, ``transformers`` (5.24.0 was used), ``gguf``, ``regex`` and ``safetensors``::

    python make_reference.py <folder of the GGUF file> <demo_checkpoint()>
"""

import hashlib
import itertools
import json
import random
import sys
from pathlib import Path

import regex
import torch
import transformers
from gguf import GGUFReader
from safetensors.torch import load_file

HERE = Path(__file__).parent
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXTS = (
    "Hello, world!",
    "  two  spaces\tand tab\n\n\nnew lines \n \n",
    "naïve café œuvre 20 °C",
    "数字と漢字 한국어 🙂👩‍👩‍👧‍👦",
    "def f(x):\n    return x ** 2  # 123456.789e-10",
    "Year 2024 and ١٢٣ ½ ② Ⅷ",
    "it's we're I'LL don't",
    "a\u0301 \u200b\u00a0\ufeff x",
    "",
)
POOL = "abcXYZ  \t\n'\"éüß漢字한국🙂\u0301\u200b\u00a0½٣²Ⅷ0123456789.,;:!?()[]{}_-+*/<>="
QUESTION = "What is the capital of France?"
TENSORS = ("model.embed_tokens", "model.norm", "model.layers.0.", "model.layers.29.")
TOKENS = 24


def byte_letters():
    """GPT-2's printable letter for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable}
    return letters | {b: chr(256 + i) for i, b in enumerate(others)}


def encoder(reader):
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    merges = reader.get_field("tokenizer.ggml.merges").contents()
    ids = {token: i for i, token in enumerate(tokens)}
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    letters = byte_letters()

    def word_ids(word):
        parts = [letters[b] for b in word.encode()]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: rank.get(pair, len(rank)))
            if best not in rank:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        return [ids[part] for part in parts]

    def encode(text):
        pieces = regex.findall(r"\p{N}|\P{N}+", text)
        return [
            i for piece in pieces for word in regex.findall(WORDS, piece) for i in word_ids(word)
        ]

    return encode


def digest(tensor):
    return hashlib.sha256(tensor.to(torch.bfloat16).view(torch.int16).numpy().tobytes()).hexdigest()


def dequantize(stored, module):
    codes = stored[f"{module}.weight"].to(torch.int64)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    values = table[torch.stack([codes & 15, codes >> 4], -1).flatten(1)]
    scale = stored[f"{module}.weight_scale"].float() * stored[f"{module}.weight_scale_2"]
    return values * scale.repeat_interleave(16, 1)


def greedy(checkpoint, model):
    stored = load_file(checkpoint / "model.safetensors")
    state = {name: stored[name].float() for name in stored if name.endswith("norm.weight")}
    state["model.embed_tokens.weight"] = stored["model.embed_tokens.weight"].float()
    for name in stored:
        if name.endswith(".weight_scale_2"):
            module = name.removesuffix(".weight_scale_2")
            state[f"{module}.weight"] = dequantize(stored, module)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # tied
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    messages = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    found = model.generate(
        torch.tensor([ids]),
        max_new_tokens=TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    top = torch.stack(found.logits)[:, 0].topk(2).values
    new = found.sequences[0, len(ids) :].tolist()
    gap = (top[:, 0] - top[:, 1]).min().item()
    return {"prompt": ids, "tokens": new, "text": tokenizer.decode(new), "smallest_gap": gap}


def main(folder, checkpoint):
    file = next(Path(folder).glob("*.gguf"))
    encode = encoder(GGUFReader(file))
    random.seed(0)
    mixed = ["".join(random.choices(POOL, k=random.randint(1, 60))) for _ in range(40)]
    texts = [{"text": text, "ids": encode(text)} for text in (*TEXTS, *mixed)]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file.name, dtype=torch.float32
    )
    state = model.state_dict()
    chosen = [n for n in state if n.startswith(TENSORS)]
    digests = {name: digest(state[name]) for name in chosen}
    plain = transformers.LlamaForCausalLM(model.config).eval()
    plain.config.quantization_config = None
    sections = [
        f'"transformers": "{transformers.__version__}"',
        f'"digests": {json.dumps(digests, indent=1)}',
        f'"greedy": {json.dumps(greedy(Path(checkpoint), plain))}',
        '"texts": [\n' + ",\n".join(json.dumps(t, ensure_ascii=False) for t in texts) + "\n]",
    ]
    (HERE / "reference.json").write_text("{\n" + ",\n".join(sections) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
