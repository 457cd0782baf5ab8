"""What is cached of a text or a conversation is there whatever comes after it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

import fp4jax
from fp4jax import Tokenizer
from fp4jax.generation.opening_tokens import opening_of_chat, opening_of_text

TESTS = Path(__file__).parents[1]
DATA = TESTS / "data" / "tokenizer"
CODE = """
    def _place(maker, saved, *, axes: Axes, batch: int) -> Any:  # see `fill_rows`
        if not (found := [n for n in saved if n.endswith("_proj")]):\n\n\n
            raise KeyError(f"{saved!r}: 12345678901234567890, 3.14159…")
        return "中文字符串没有空格，所以一个词可以很长很长。", "a" * 99, (("x",),)
"""
PROSE = (TESTS.parent / "bench" / "data" / "perplexity.txt").read_text(encoding="utf-8")
TEXT = PROSE[:2000] + 3 * CODE + "=" * 90 + PROSE[2000:3000]
SYSTEM = ("system", "You are kind and brief, and answer in verse.")
DOCUMENT = ("user", "A long document about tokens.\n\nIt has several lines.")


def metaspace() -> Tokenizer:
    """Pieces that reach over line breaks and punctuation, divided by spaces alone."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=900, show_progress=False))
    return Tokenizer(backend)


TOKENIZERS = (Tokenizer.from_pretrained(DATA), metaspace())


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte-level", "metaspace"])
@settings(max_examples=200, deadline=None, derandomize=True)
@given(start=st.integers(0, len(TEXT) - 300), size=st.integers(1, 200), more=st.text(max_size=9))
@example(start=0, size=150, more="\nSummarize the above.")
@example(start=0, size=151, more="Summarize")
def test_every_continuation_of_a_text_begins_with_them(tokenizer, start, size, more):
    text = TEXT[start : start + size]
    found = opening_of_text(tokenizer, text)
    for whole in (text, text + more, TEXT[start : start + size + 80]):
        assert tuple(tokenizer.encode(whole)[: len(found)]) == found
    # Little is left out: the last word, however it is spelled, and one token more.
    earlier, _, _ = text.rstrip()[:-90].rpartition(" ")
    assert not earlier or len(found) >= len(tokenizer.encode(earlier))


@pytest.fixture(params=["plain", "strict_roles", "tools_and_thinking"])
def tokenizer(request, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / name, tmp_path)
    shutil.copy(DATA / "templates" / f"{request.param}.jinja", tmp_path / "chat_template.jinja")
    return Tokenizer.from_pretrained(tmp_path)


def chat(*said):
    return [{"role": role, "content": content} for role, content in said]


@pytest.mark.parametrize(
    ("cached", "ends"),
    [
        ([SYSTEM], "verse."),
        ([DOCUMENT], "It has sev"),
        ([SYSTEM, DOCUMENT], "It has sev"),
        ([SYSTEM, DOCUMENT, ("assistant", "I see.")], "see."),
        ([("user", "Hi"), ("assistant", "Yes?")], "Yes?"),
    ],
)
def test_every_continuation_of_a_chat_begins_with_them(tokenizer, cached, ends):
    found = opening_of_chat(tokenizer, chat(*cached))
    text = tokenizer.decode(found)
    assert ends in text
    (*before, (role, last)), answers = cached, (("assistant", "Well."), ("user", "And then?"))
    for question in ("Why?", " why", "\n\nSummarize it", "42", "é", "…"):
        asked = [*cached, ("user", question)]
        if role == "user":
            asked = [*before, (role, last + question)]
        for whole in (asked, [*asked, *answers]):
            assert tuple(tokenizer.encode_chat(chat(*whole))[: len(found)]) == found
    if role == "user":  # and the same once more
        assert tuple(tokenizer.encode_chat(chat(*cached))[: len(found)]) == found


def test_a_word_or_less_is_what_opens_its_turn(tokenizer):
    found = opening_of_chat(tokenizer, chat(SYSTEM, ("user", "Hi")))
    assert tuple(tokenizer.encode_chat(chat(SYSTEM, ("user", "Hello")))[: len(found)]) == found
    assert "verse." in tokenizer.decode(found)
    assert not opening_of_text(TOKENIZERS[1], "word")


@pytest.mark.parametrize("tokenizer", ["plain"], indirect=True)
def test_continued_is_the_whole_prompt(oracles, tokenizer):
    model = fp4jax.load_model(oracles / "llama-modelopt", dtype="float32", progress=False)
    whole = []
    for prompt, text, wanted in (
        ("A text that", " goes on", "A text that goes on"),
        (chat(SYSTEM), "Hi", chat(SYSTEM, ("user", "Hi"))),
        (chat(SYSTEM, DOCUMENT), " Why?", chat(SYSTEM, ("user", f"{DOCUMENT[1]} Why?"))),
    ):
        cache = fp4jax.make_prompt_cache(model, tokenizer, prompt)
        whole.append(cache.continued(text))
        assert whole[-1] == wanted
    options = {"max_tokens": 6, "ignore_eos": True}
    plain = fp4jax.batch_generate(model, tokenizer, whole[2:], **options)
    found = fp4jax.batch_generate(model, tokenizer, whole[2:], prompt_cache=cache, **options)
    assert found.texts == plain.texts
    assert 0 < len(cache.tokens) == found.stats.cached_tokens < found.stats.prompt_tokens
    ids = fp4jax.make_prompt_cache(model, None, [1, 2, 3])
    with pytest.raises(fp4jax.errors.GenerationError, match="token ids, after which text"):
        ids.continued("Hi")
