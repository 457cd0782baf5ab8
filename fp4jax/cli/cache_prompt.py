"""``fp4jax cache-prompt``: the beginning of many prompts, run through the model once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fp4jax.cli import options


def run_cache_prompt(
    prompt_cache_file: Annotated[
        Path,
        typer.Option(
            "--prompt-cache-file", dir_okay=False, help="File to write or replace (safetensors)."
        ),
    ],
    model: options.ModelPath = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            help="Beginning of the user's message, such as a document; '-' reads standard input.",
        ),
    ] = None,
    system_prompt: options.SystemPrompt = None,
    ignore_chat_template: options.IgnoreChatTemplate = False,
    draft_model: options.DraftModel = None,
    dtype: options.Dtype = None,
    quiet: options.Quiet = False,
) -> None:
    """Keep what the model makes of a system prompt or a document in a file, for `generate
    --prompt-cache-file` and `chat --prompt-cache-file` to go on from."""
    from fp4jax.generation import make_prompt_cache, save_prompt_cache

    if prompt is None and system_prompt is None:
        raise typer.BadParameter("give --prompt, --system-prompt, or both")
    if not prompt_cache_file.expanduser().absolute().parent.is_dir():
        raise typer.BadParameter(f"--prompt-cache-file {prompt_cache_file}: no such folder")
    draft = options.open_draft(draft_model, None, dtype, quiet)
    text = sys.stdin.read() if prompt == "-" else prompt
    engine, tokenizer = options.open_model(model, dtype, quiet)
    request = options.request_of(tokenizer, text, system_prompt, ignore_chat_template)
    with options.shown(quiet) as report:
        made = make_prompt_cache(engine, tokenizer, request, draft=draft, progress=report)
    save_prompt_cache(prompt_cache_file, made)
    if not quiet:
        size = prompt_cache_file.expanduser().stat().st_size
        print(
            f"{prompt_cache_file}: {len(made.tokens)} tokens, {size / 1e6:.1f} MB", file=sys.stderr
        )
