"""``fp4jax generate``: one answer, streamed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp4jax.cli import options
from fp4jax.cli.options import shown

if TYPE_CHECKING:
    from fp4jax.generation import AcceptanceStats, GenerationStep

DEFAULT_PROMPT = "What is the capital of France?"


def run_generate(
    model: options.ModelPath = None,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="The prompt; '-' reads standard input.")
    ] = DEFAULT_PROMPT,
    system_prompt: options.SystemPrompt = None,
    ignore_chat_template: options.IgnoreChatTemplate = False,
    prompt_cache_file: options.PromptCacheFile = None,
    max_tokens: options.MaxTokens = 256,
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
    """Generate text from a prompt and stream it to the standard output."""
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
    text = sys.stdin.read() if prompt == "-" else prompt
    engine, tokenizer = options.open_model(model, dtype, quiet)
    cached = options.open_prompt_cache(prompt_cache_file, engine)
    if cached is None:
        request = options.request_of(tokenizer, text, system_prompt, ignore_chat_template)
    else:  # as it was cached, so is it continued
        request = cached.continued(text)
    last = None
    more = {"draft": draft, "num_draft_tokens": num_draft_tokens, "prompt_cache": cached}
    for last in stream(engine, tokenizer, request, sampling=sampling, quiet=quiet, **more):
        print(last.text, end="", flush=True)
    print()
    if last is not None and not quiet:
        print(summary(last), file=sys.stderr)


def stream(
    engine: Any, tokenizer: Any, request: Any, *, sampling: Any, quiet: bool, **more: Any
) -> Iterator[GenerationStep]:
    """Steps of an answer; a progress bar on the error stream until the first one is there."""
    from fp4jax.generation import stream_generate

    with shown(quiet) as report:
        steps = stream_generate(
            engine, tokenizer, request, sampling=sampling, progress=report, **more
        )
        first = next(steps)  # everything is compiled by then
    yield first
    yield from steps


def summary(step: GenerationStep) -> str:
    """The closing statistics."""
    drafted, cached = "", ""
    if step.acceptance is not None:
        drafted = f"Draft: {acceptance_text(step.acceptance)}\n"
    if step.cached_tokens:
        cached = f"{step.cached_tokens} of them cached, "
    return (
        f"Prompt: {step.prompt_tokens} tokens, {cached}{step.prompt_tps:.1f} tokens/s\n"
        f"Generation: {step.generation_tokens} tokens, {step.generation_tps:.1f} tokens/s\n"
        f"{drafted}Peak memory: {step.peak_memory:.3f} GB"
    )


def acceptance_text(acceptance: AcceptanceStats) -> str:
    """Mean and distribution of the tokens that a step gave."""
    shares = (f"{i + 1}: {n}" for i, n in enumerate(acceptance.histogram) if n)
    return (
        f"{acceptance.mean_accepted_length:.2f} tokens/step in {acceptance.steps} steps "
        f"({', '.join(shares)})"
    )
