"""Chat templates: rendered as transformers 5.24.0 renders them, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import MappingProxyType

import pytest
from tiny_checkpoint import add_tokenizer

from fp4jax import Tokenizer
from fp4jax.errors import TokenizerError

DATA = Path(__file__).parent / "data" / "tokenizer"
REFERENCE = json.loads((DATA / "reference.json").read_text(encoding="utf-8"))
QUESTION = (MappingProxyType({"role": "user", "content": "Hi"}),)


@pytest.fixture
def folder(tmp_path):
    """A copy of the reference tokenizer's files, to damage."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / name, tmp_path)
    return tmp_path


def set_field(folder: Path, name: str, value) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))


@pytest.mark.parametrize(
    "case",
    REFERENCE["rendered"],
    ids=lambda case: f"{case['template']}-{case['chat']}-{'-'.join(case['options'])}",
)
def test_chats_render_as_transformers_renders_them(folder, case):
    shutil.copy(DATA / "templates" / case["template"], folder / "chat_template.jinja")
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.has_chat_template
    messages = REFERENCE["chats"][case["chat"]]
    if "error" in case:
        with pytest.raises(TokenizerError) as error:
            tokenizer.encode_chat(messages, **case["options"])
        assert case["error"] in str(error.value) and "chat_template.jinja" in str(error.value)
        return
    assert tokenizer.apply_chat_template(messages, **case["options"]) == case["text"]
    # strict_roles.jinja writes <s> itself, which must not come twice.
    assert tokenizer.encode_chat(messages, **case["options"]) == case["ids"]


def test_where_a_template_is_looked_for(folder):
    set_field(folder, "chat_template", "one: {{ messages[0].content }}{{ eos_token }}")
    assert Tokenizer.from_pretrained(folder).apply_chat_template(QUESTION) == "one: Hi<|im_end|>"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "{{ tools }}"}]
    set_field(folder, "chat_template", named)
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template(QUESTION) == "d"
    assert tokenizer.apply_chat_template(QUESTION, tools=[{"a": 1}]) == "[{'a': 1}]"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_pretrained(folder).apply_chat_template(QUESTION) == "file"
    (folder / "chat_template.jinja").unlink()
    set_field(folder, "chat_template", named[1:])
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json.*tool_use.*'default'"):
        Tokenizer.from_pretrained(folder).apply_chat_template(QUESTION)
    set_field(folder, "chat_template", 3)
    with pytest.raises(TokenizerError, match=r"chat_template.*3"):
        Tokenizer.from_pretrained(folder)


def test_strftime_now_gives_the_date(folder):
    set_field(folder, "chat_template", "{{ strftime_now('%Y') }}")
    assert int(Tokenizer.from_pretrained(folder).apply_chat_template(QUESTION)) >= 2024


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_templates_run_in_a_sandbox(folder, template):
    set_field(folder, "chat_template", template)
    with pytest.raises(TokenizerError, match="chat template"):
        Tokenizer.from_pretrained(folder).apply_chat_template(QUESTION)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("Hi", "list of dicts.*'Hi'"),
        ({"role": "user", "content": "Hi"}, "list of dicts"),
        (3, "list of dicts.*3"),
        ([], "empty"),
        (["Hi"], r"messages\[0\] must be a dict.*'Hi'"),
        ([QUESTION[0], {"content": "x"}], r"messages\[1\] needs 'role'"),
        ([{"role": 1, "content": "x"}], r"messages\[0\] needs 'role'.*1"),
        ([{"role": "user"}], r"messages\[0\] needs 'content'"),
        ([{"role": "user", "content": None}], r"messages\[0\] needs 'content'"),
        ([{"role": "user", "content": 3}], r"messages\[0\]: 'content' must be.*3"),
        ([{"role": "user", "content": [object()]}], r"messages\[0\] must hold plain JSON"),
    ],
)
def test_messages_of_another_form_are_refused(folder, messages, complaint):
    set_field(folder, "chat_template", "x")
    with pytest.raises(TokenizerError, match=complaint):
        Tokenizer.from_pretrained(folder).encode_chat(messages)


def test_chat_calls_that_cannot_work(folder):
    with pytest.raises(TokenizerError, match=r"no chat template \(chat_template.jinja"):
        Tokenizer.from_pretrained(folder).encode_chat(QUESTION)
    set_field(folder, "chat_template", "fine\n{% if %}")
    broken = Tokenizer.from_pretrained(folder)
    assert broken.encode("text still works")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: .*not valid Jinja \(line 2"):
        broken.encode_chat(QUESTION)
    set_field(folder, "chat_template", "{{ tools }}")
    with pytest.raises(TokenizerError, match="tools must hold plain JSON"):
        Tokenizer.from_pretrained(folder).encode_chat(QUESTION, tools=[print])


def test_the_tiny_tokenizer_of_other_tests_loads(tmp_path):
    add_tokenizer(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).apply_chat_template(QUESTION).endswith("assistant|>")
