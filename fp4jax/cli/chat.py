"""``fp4jax chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Any

from fp4jax.cli import options
from fp4jax.cli.generate import stream, summary
from fp4jax.errors import GenerationError, TokenizerError

HELP = "/exit (or Ctrl-D) ends, /reset starts over, /help shows this; Ctrl-C stops an answer."


def run_chat(
    model: options.ModelPath = None,
    system_prompt: options.SystemPrompt = None,
    prompt_cache_file: options.PromptCacheFile = None,
    max_tokens: options.MaxTokens = 512,
    temp: options.Temp = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    logit_bias: options.LogitBias = None,
    stop: options.Stop = None,
    seed: options.Seed = None,
    draft_model: options.DraftModel = None,
    num_draft_tokens: options.NumDraftTokens = None,
    dtype: options.Dtype = None,
    quiet: options.Quiet = False,
) -> None:
    """Talk with a model. The conversation is kept until /reset or the end."""
    sampling = options.sampling_params(
        max_tokens=max_tokens,
        temp=temp,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        stop=stop,
        seed=seed,
    )
    options.check_one_beginning(prompt_cache_file, system_prompt)
    draft = options.open_draft(draft_model, num_draft_tokens, dtype, quiet)
    engine, tokenizer = options.open_model(model, dtype, quiet)
    if not tokenizer.has_chat_template:
        raise TokenizerError(
            f"{model}: no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); use `fp4jax generate` for plain text"
        )
    cached = options.open_prompt_cache(prompt_cache_file, engine)
    if cached is not None and not isinstance(cached.continued(""), list):
        raise GenerationError(
            f"{prompt_cache_file}: text was cached, not a conversation; make it anew without "
            "--ignore-chat-template, or use `fp4jax generate`"
        )
    start = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    messages: list[Any] = []
    more = {"draft": draft, "num_draft_tokens": num_draft_tokens, "prompt_cache": cached}
    if not quiet:
        print(HELP, file=sys.stderr)
    while True:
        line = _ask()
        if line is None or line in ("/exit", "/quit"):
            return
        if not line:
            continue
        if line == "/reset":
            messages = []
            continue
        if line == "/help":
            print(HELP, file=sys.stderr)
            continue
        if cached is not None and not messages:
            turn = _after(cached, line)
        else:
            turn = [*(messages or start), {"role": "user", "content": line}]
        try:
            answer = _answer(engine, tokenizer, turn, sampling, quiet, more)
        except GenerationError as error:  # most often: the conversation has filled the context
            print(f"{error} (/reset starts over)", file=sys.stderr)
            continue
        messages = [*turn, {"role": "assistant", "content": answer}]


def _ask() -> str | None:
    """A line from the person; None at the end of the input."""
    prompt = ">> " if sys.stdin.isatty() else ""
    try:
        return input(prompt).strip()
    except EOFError:
        return None


def _after(cached: Any, line: str) -> list[Any]:
    """The cached conversation and what is said first, apart from a document before it."""
    *_, last = cached.continued("")
    apart = last["content"] and not last["content"][-1].isspace()
    return cached.continued(f"\n\n{line}" if apart else line)


def _answer(engine, tokenizer, messages, sampling, quiet: bool, more: dict) -> str:
    """Streams an answer; Ctrl-C ends it and keeps what was said."""
    said, last = [], None
    try:
        for last in stream(engine, tokenizer, messages, sampling=sampling, quiet=quiet, **more):
            print(last.text, end="", flush=True)
            said.append(last.text)
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=sys.stderr)
    print()
    if last is not None and not quiet:
        print(summary(last), file=sys.stderr)
    return "".join(said)
