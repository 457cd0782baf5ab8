"""Tokenizer, streaming and chat templates, against what transformers did with the same files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from fp4jax import Tokenizer
from fp4jax.errors import TokenizerError
from fp4jax.generation.requests import Detokenizer, TextTokenizer

DATA = Path(__file__).parent / "data" / "tokenizer"
REFERENCE = json.loads((DATA / "reference.json").read_text(encoding="utf-8"))
QUESTION = (MappingProxyType({"role": "user", "content": "Hi"}),)


def byte_level() -> Tokenizer:
    return Tokenizer.from_pretrained(DATA)


def _wrap(model, decoder) -> Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<think>"])
    return Tokenizer(backend, {"eos_token": "</s>"})


def byte_fallback() -> Tokenizer:
    """As Llama 2's: pieces with ▁ for a space, bytes as <0x..>, one leading space dropped."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁▁", "▁a", "b", "é", "�"]
    return _wrap(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True),
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
    )


def metaspace() -> Tokenizer:
    pieces = [("<unk>", 0.0), *((piece, -1.0) for piece in ("▁", "▁▁", "▁a", "b", "a▁b", "é"))]
    return _wrap(models.Unigram(pieces, 0, False), decoders.Metaspace())


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "a", "##b", "##", ".", "'", "do", "not", "é"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    return _wrap(models.WordPiece(vocabulary, unk_token="[UNK]"), decoders.WordPiece())


def bare() -> Tokenizer:
    """No decoder at all: the library puts spaces between tokens."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "�": 2}, "a"))
    return Tokenizer(backend)


KINDS = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "metaspace": metaspace,
    "word-piece": word_piece,
    "no decoder": bare,
}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level()


@pytest.fixture
def folder(tmp_path):
    """A copy of the reference tokenizer's files, to damage."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / name, tmp_path)
    return tmp_path


def set_field(folder: Path, name: str, value) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))


def test_encodes_and_decodes_as_transformers_does(tokenizer):
    for case in REFERENCE["encoded"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["decoded"]
    assert tokenizer.encode("x", add_special_tokens=False) == tokenizer.encode("x")[1:]
    assert tokenizer.decode(np.asarray(tokenizer.encode("héé")), skip_special_tokens=True) == "héé"


def test_properties(tokenizer):
    assert isinstance(tokenizer, TextTokenizer)
    assert isinstance(tokenizer.detokenizer(), Detokenizer)
    assert tokenizer.vocab_size == 343
    assert tokenizer.eos_token_ids == (341,)
    assert tokenizer.encode("<|im_end|>")[1:] == [341]
    assert str(DATA) in repr(tokenizer) and not tokenizer.has_chat_template


def test_padding_and_truncation_in_the_file_do_not_touch_prompts(tokenizer):
    stated = json.loads((DATA / "tokenizer.json").read_text())
    assert stated["truncation"]["max_length"] == 4 and stated["padding"]["strategy"] == {"Fixed": 8}
    assert len(tokenizer.encode("a b c d e f g h i j k l")) > 8
    assert len(tokenizer.encode("a")) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [False, True])
def test_streamed_pieces_join_to_the_decoded_text(kind, skip):
    tokenizer = KINDS[kind]()
    size = tokenizer.vocab_size
    # Ids beyond the vocabulary are there too: a model's head may be padded.
    ids = st.lists(st.integers(0, size + 2), max_size=40)

    @settings(max_examples=200, deadline=None)
    @given(ids)
    @example([size - 1, size - 2] * 3)
    def check(ids):
        stream = tokenizer.detokenizer(skip_special_tokens=skip)
        pieces = [stream.add(token) for token in ids]
        assert "".join([*pieces, stream.flush()]) == tokenizer.decode(ids, skip_special_tokens=skip)
        assert stream.flush() == ""

    check()


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_a_streamed_piece_never_breaks_a_character(text):
    text = text.replace("\ufffd", "")
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = tokenizer.detokenizer()
    pieces = [stream.add(token) for token in ids]
    assert stream.flush() == "" and not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_piece_comes_as_soon_as_its_bytes_are_there():
    tokenizer = byte_fallback()
    one = tokenizer.detokenizer()
    ids = [258 + 1, 258 + 1, *(1 + b for b in "é☃".encode()), 258 + 2, 1 + 0xFF]
    assert [one.add(token) for token in ids] == ["a", " a", "", "", "", "", "", "é☃b", ""]
    assert one.flush() == "\ufffd"
    tokenizer = byte_level()
    stream = tokenizer.detokenizer()
    ids = [tokenizer.encode(c, add_special_tokens=False)[0] for c in ("x", "é", "☃")]
    assert [stream.add(token) for token in ids] == ["x", "", ""]


def test_streaming_decodes_only_the_last_tokens():
    class Counting:
        def __init__(self, backend):
            self.backend, self.longest = backend, 0

        def decode(self, ids, **options):
            self.longest = max(self.longest, len(ids))
            return self.backend.decode(ids, **options)

        def __getattr__(self, name):
            return getattr(self.backend, name)

    from fp4jax.detokenizer import StreamingDetokenizer

    tokenizer = byte_level()
    counting = Counting(tokenizers.Tokenizer.from_file(str(DATA / "tokenizer.json")))
    stream = StreamingDetokenizer(counting)
    ids = tokenizer.encode("naïve “text” 🙂 " * 100)
    assert "".join(map(stream.add, ids)) == tokenizer.decode(ids)
    assert counting.longest < 20 < len(ids)


def test_special_tokens_map_fills_in(folder):
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "</s>", "pad_token": {"content": "<s>"}})
    )
    set_field(folder, "chat_template", "{{ pad_token }}{{ eos_token }}{{ unk_token }}")
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template(QUESTION) == "<s><|im_end|>"
    set_field(folder, "eos_token", None)
    assert Tokenizer.from_pretrained(folder).eos_token_ids == ()
    set_field(folder, "eos_token", "<|of another model|>")
    assert Tokenizer.from_pretrained(folder).eos_token_ids == ()


def test_a_named_special_token_is_one_even_if_the_vocabulary_does_not_say_so(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE({"E": 0, "N": 1, "D": 2, "END": 3}, []))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_pretrained(tmp_path).encode("END") == [0, 1, 2]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "END"}')
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert (tokenizer.encode("END"), tokenizer.eos_token_ids) == ([3], (3,))


def test_missing_and_damaged_files_are_named(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(TokenizerError, match=r"no tokenizer: tokenizer.json is missing"):
        Tokenizer.from_pretrained(empty)
    with pytest.raises(TokenizerError, match="no such checkpoint folder"):
        Tokenizer.from_pretrained(empty / "none")
    (empty / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match="AutoTokenizer"):
        Tokenizer.from_pretrained(empty)
    config = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(config[:-20])
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json"):
        Tokenizer.from_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(config)
    (folder / "chat_template.jinja").write_bytes(b"\xff\xff")
    with pytest.raises(TokenizerError, match=r"chat_template.jinja"):
        Tokenizer.from_pretrained(folder)
    whole = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(TokenizerError, match=r"tokenizer.json: not a usable tokenizer"):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("eos_token", 2, r"tokenizer_config.json: 'eos_token' must be text, found 2"),
        ("added_tokens_decoder", [1], "unusable added_tokens_decoder"),
        ("added_tokens_decoder", {"x": {"content": "y"}}, "unusable added_tokens_decoder"),
        ("added_tokens_decoder", {"7": {"special": True}}, "unusable added_tokens_decoder"),
        ("added_tokens_decoder", {"500": {"content": "new"}}, r"'new' the id 500.*gets 341"),
        ("added_tokens_decoder", {"5": {"content": "<s>"}}, r"'<s>' the id 5.*gets 0"),
    ],
)
def test_a_contradictory_configuration_is_refused(folder, name, value, complaint):
    set_field(folder, name, value)
    with pytest.raises(TokenizerError, match=complaint):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", [None, b"x", "a\ud800"])
def test_text_that_cannot_be_encoded_is_refused(tokenizer, text):
    with pytest.raises(TokenizerError, match="text to encode"):
        tokenizer.encode(text)


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, "a"])
def test_ids_that_are_none_are_refused(tokenizer, token):
    with pytest.raises(TokenizerError, match="token ids"):
        tokenizer.decode([token])
    with pytest.raises(TokenizerError, match="token ids"):
        tokenizer.detokenizer().add(token)


def test_importing_the_package_does_not_import_the_libraries():
    code = """
import sys, fp4jax, fp4jax.loading
print([name for name in ("tokenizers", "jinja2") if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
