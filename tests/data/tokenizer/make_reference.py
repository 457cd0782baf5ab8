"""Trains the small tokenizer here and writes what transformers does with it.

Run with ``tokenizers`` and ``transformers`` (5.24.0 was used): ``python make_reference.py``.
"""

import json
from pathlib import Path

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
TEXTS = (
    "Hello, world!",
    "  two  spaces, a\ttab\nand lines\r\n\r\n",
    "naïve café: œuvre — “quotes” … 20 °C",
    "数字と漢字、ひらがな。한국어 텍스트",
    "emoji 🙂👩‍👩‍👧‍👦🇫🇷 and ☃",
    "def f(x):\n    return x ** 2  # 123456.789e-10",
    "<|im_start|>user\nHi<|im_end|>\n<|listed_elsewhere|><think>",
    "<s> is the beginning, </s> the end",
    "a\u0301 ﬁ ½ \u200b\u00a0\ufffd\ufeff",
    "",
    " ",
)


def chats():
    return {
        "one question": [{"role": "user", "content": "What is 2 < 3 & why?"}],
        "system": [
            {"role": "system", "content": "  Answer in “français”.  "},
            {"role": "user", "content": "Où est la gare ?"},
        ],
        "turns": [
            {"role": "user", "content": "Hi\n"},
            {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello!"},
            {"role": "user", "content": "Bye"},
        ],
        "last is the assistant": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello, \n", "reasoning_content": "greet\n"},
        ],
        "tool calls": [
            {"role": "user", "content": "Weather in 東京?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": "w", "arguments": {"city": "東京 <b>"}},
                    },
                    {"type": "function", "function": {"name": "w", "arguments": '{"city": "x"}'}},
                ],
            },
            {"role": "tool", "content": '{"t": 21}'},
            {"role": "tool", "content": '{"t": 3}'},
        ],
        "blocks": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "first "},
                    {"type": "image"},
                    {"type": "text", "text": "second"},
                ],
            }
        ],
        "roles do not alternate": [
            {"role": "user", "content": "a"},
            {"role": "user", "content": "b"},
        ],
    }


def options():
    tool = {
        "type": "function",
        "function": {
            "name": "w",
            "description": "Weather of a city, “now”, in <°C>.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    return (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "enable_thinking": False},
        {
            "add_generation_prompt": True,
            "tools": [tool],
            "documents": [{"title": "T", "text": "é & è"}],
        },
    )


def train():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<s>", "</s>", "<|im_start|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    # As a file written while training batches would have it; prompts are not cut or padded.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(HERE / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    listed = {
        str(size): {"content": "<|im_end|>", "special": True, "normalized": False},
        str(size + 1): {"content": "<|listed_elsewhere|>", "special": False, "lstrip": True},
    }
    config = {
        "added_tokens_decoder": listed,
        "bos_token": "<s>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (HERE / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main():
    train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(HERE)
    encoded = [
        {
            "text": text,
            "ids": tokenizer.encode(text),
            "decoded": tokenizer.decode(tokenizer.encode(text)),
        }
        for text in TEXTS
    ]
    rendered = []
    for template in sorted((HERE / "templates").glob("*.jinja")):
        tokenizer.chat_template = template.read_text(encoding="utf-8")
        for name, chat in chats().items():
            for given in options():
                case = {"template": template.name, "chat": name, "options": given}
                try:
                    case["text"] = tokenizer.apply_chat_template(chat, tokenize=False, **given)
                    case["ids"] = tokenizer.apply_chat_template(chat, return_dict=False, **given)
                except Exception as error:
                    case["error"] = str(error)
                rendered.append(case)
    sections = {"encoded": encoded, "rendered": rendered}
    lines = [f'"transformers": "{transformers.__version__}"', f'"chats": {_json(chats())}']
    for name, entries in sections.items():
        lines.append(f'"{name}": [\n' + ",\n".join(map(_json, entries)) + "\n]")
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (HERE / "reference.json").write_text(text, encoding="utf-8")


def _json(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    main()
