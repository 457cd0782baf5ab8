"""``fp4jax perplexity``: how well a model predicts a text file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4jax.cli import options


def run_perplexity(
    text: Annotated[Path, typer.Argument(help="UTF-8 text file; '-' reads standard input.")],
    model: options.ModelPath = None,
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", help="Tokens a window.")
    ] = 1024,
    stride: Annotated[
        int | None,
        typer.Option("--stride", help="Tokens the window moves on. Default: half of it."),
    ] = None,
    dtype: options.Dtype = None,
    quiet: options.Quiet = False,
) -> None:
    """Perplexity of a text under a model, over sliding windows."""
    from fp4jax.evaluation import perplexity

    content = options.read_text(text)
    engine, tokenizer = options.open_model(model, dtype, quiet)
    window = min(sequence_length, engine.max_context)
    with options.shown(quiet) as report:
        found = perplexity(
            engine, tokenizer.encode(content), window=window, stride=stride, progress=report
        )
    print(f"perplexity {found.value:.4f} over {found.tokens} tokens (windows of {window})")
