"""``cache-prompt`` and ``--prompt-cache-file``: the same answers from a cached beginning."""

from __future__ import annotations

import io

import pytest
from safetensors import safe_open
from tiny_checkpoint import add_tokenizer, copy_oracle

import fp4jax
from fp4jax.cli import main

DOCUMENT = "A document of several words.\nIts second line is the last"
SYSTEM = "Answer in verse, and be brief."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, oracles):
    folder = copy_oracle(oracles, "llama-modelopt", tmp_path_factory.mktemp("cli") / "tiny")
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def engine(checkpoint):
    return fp4jax.load(checkpoint, progress=False)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr("fp4jax.cli.options.keep_compiled_programs", lambda: None)


@pytest.fixture
def run(capsys, checkpoint):
    def call(command, *arguments):
        status = main([command, "--model", str(checkpoint), *map(str, arguments)])
        return (status, *capsys.readouterr())

    return call


def chat(*said):
    return [{"role": role, "content": content} for role, content in said]


def test_a_document_is_cached_and_asked_about(run, engine, tmp_path, monkeypatch):
    file = tmp_path / "document.safetensors"
    monkeypatch.setattr("sys.stdin", io.StringIO(DOCUMENT))
    status, out, err = run("cache-prompt", "-p", "-", "--prompt-cache-file", file)
    assert (status, out) == (0, "") and "document.safetensors: " in err and " tokens, " in err
    with safe_open(file, "numpy") as stored:
        count = stored.get_slice("tokens").get_shape()[0]
    assert count > 0.8 * len(DOCUMENT)  # a token is a byte here

    for question in ("\nWhat is it about?", "Summarize"):
        asked = ("--prompt-cache-file", file, "--prompt", question, "--max-tokens", 6)
        status, out, err = run("generate", *asked)
        wanted = fp4jax.generate(*engine, chat(("user", DOCUMENT + question)), max_tokens=6)
        assert (status, out) == (0, wanted + "\n")
        assert f", {count} of them cached, " in err
    status, out, _ = run("generate", *asked, "--draft-model", "prompt-lookup", "-q")
    assert (status, out) == (0, wanted + "\n")


def test_a_conversation_goes_on_from_a_system_prompt(run, engine, tmp_path, monkeypatch):
    file = tmp_path / "system"
    cached = ("--prompt-cache-file", file, "-q")
    assert run("cache-prompt", "--system-prompt", SYSTEM, *cached)[0] == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n/reset\none\n"))
    status, out, _ = run("chat", *cached, "--max-tokens", 5)
    messages, said = chat(("system", SYSTEM)), []
    for line in ("one", "two"):
        messages += chat(("user", line))
        said.append(fp4jax.generate(*engine, messages, max_tokens=5))
        messages += chat(("assistant", said[-1]))
    assert (status, out) == (0, "\n".join([*said, said[0]]) + "\n")


def test_a_conversation_about_a_document(run, engine, tmp_path, monkeypatch):
    cached = ("--prompt-cache-file", tmp_path / "document", "-q")
    assert run("cache-prompt", "--system-prompt", SYSTEM, "-p", DOCUMENT, *cached)[0] == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("Why?\n"))
    status, out, _ = run("chat", *cached, "--max-tokens", 5)
    asked = chat(("system", SYSTEM), ("user", f"{DOCUMENT}\n\nWhy?"))
    assert (status, out) == (0, fp4jax.generate(*engine, asked, max_tokens=5) + "\n")


def test_plain_text(run, engine, tmp_path):
    cached = ("--prompt-cache-file", tmp_path / "text", "-q")
    assert run("cache-prompt", "-p", DOCUMENT, "--ignore-chat-template", *cached)[0] == 0
    status, out, _ = run("generate", *cached, "-p", " of it", "--max-tokens", 6)
    wanted = fp4jax.generate(*engine, f"{DOCUMENT} of it", max_tokens=6)
    assert (status, out) == (0, wanted + "\n")
    status, _, err = run("chat", *cached)
    assert status == 1 and "text was cached, not a conversation" in err


def test_what_is_refused(run, tmp_path, oracles):
    file = tmp_path / "cache"
    for command, arguments, wanted, message in (
        ("cache-prompt", ("--prompt-cache-file", file), 2, "--system-prompt, or both"),
        ("cache-prompt", ("-p", "a", "--prompt-cache-file", file / "c"), 2, "no such folder"),
        ("generate", ("--prompt-cache-file", file), 2, "does not exist"),
    ):
        status, _, err = run(command, *arguments)
        assert status == wanted and message in " ".join(err.replace("│", " ").split())
    assert run("cache-prompt", "-p", DOCUMENT, "-q", "--prompt-cache-file", file)[0] == 0
    cached = ("--prompt-cache-file", file)
    status, _, err = run("chat", *cached, "--system-prompt", SYSTEM)
    assert status == 2 and "give --system-prompt to" in " ".join(err.replace("│", " ").split())
    other = copy_oracle(oracles, "qwen3-ct-nvfp4", tmp_path / "other")
    add_tokenizer(other)
    status, _, err = run("generate", *cached, "--model", other)
    assert status == 1 and f"{file}: the prompt cache was made with architecture" in err
    file.write_bytes(file.read_bytes()[:-1])
    status, _, err = run("generate", *cached)
    assert status == 1 and "truncated" in err and err.count("\n") == 1
