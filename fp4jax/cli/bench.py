"""``fp4jax bench``: tokens a second of a model on this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from fp4jax.cli import options


def run_bench(
    model: options.ModelPath = None,
    random_weights: Annotated[
        Path | None,
        typer.Option(
            "--random-weights",
            metavar="CONFIG.json",
            help="Time a model of this configuration with random weights, quantized as it says; "
            "no checkpoint is needed.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", "-p", help="Tokens of each prompt.")
    ] = 512,
    generation_tokens: Annotated[
        int, typer.Option("--generation-tokens", "-g", help="Tokens to generate for each.")
    ] = 128,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", help="Rows at once.")] = 1,
    num_trials: Annotated[int, typer.Option("--num-trials", "-n", help="Timed calls.")] = 3,
    draft_model: options.DraftModel = None,
    num_draft_tokens: options.NumDraftTokens = None,
    dtype: options.Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Time prefill and decode on random tokens, compilation left out; with a drafter, both ways."""
    from rich.console import Console
    from rich.table import Table

    from fp4jax.benchmark import benchmark
    from fp4jax.cli.generate import acceptance_text

    draft = options.open_draft(draft_model, num_draft_tokens, dtype, quiet)
    if random_weights is None:
        engine, _ = options.open_model(model, dtype, quiet)
    elif model is not None:
        raise typer.BadParameter("--random-weights stands in place of --model; give one of them")
    else:
        engine = options.open_random(random_weights, dtype, quiet)
    with options.shown(quiet) as report:
        found = benchmark(
            engine,
            prompt_tokens=prompt_tokens,
            generation_tokens=generation_tokens,
            batch_size=batch_size,
            trials=num_trials,
            draft=draft,
            num_draft_tokens=num_draft_tokens,
            progress=report,
        )
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), **found.derived()}, indent=2))
        return
    table = Table(title=f"{engine!r}, median of {found.trials}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    rows = [
        (
            f"prompt ({found.prompt_tokens} × {found.batch_size})",
            f"{found.prompt_tps:.1f} tokens/s",
        ),
        (
            f"generation ({found.generation_tokens} × {found.batch_size})",
            f"{found.generation_tps:.1f} tokens/s",
        ),
        ("peak memory", f"{found.peak_memory:.3f} GB"),
        ("bytes a decode step reads", f"{found.step_bytes / 1e6:.1f} MB"),
    ]
    if found.bandwidth is not None and found.floor_share is not None:
        rows += [
            ("memory bandwidth, measured", f"{found.bandwidth / 1e9:.1f} GB/s"),
            ("share of the bandwidth floor", f"{100 * found.floor_share:.1f} %"),
        ]
    if found.acceptance is not None:
        rows += [
            ("generation with the drafter", f"{found.drafted_tps:.1f} tokens/s"),
            ("against without", f"{found.derived()['speedup']:.2f} ×"),
            ("tokens a step", acceptance_text(found.acceptance)),
        ]
    for row in rows:
        table.add_row(*row)
    Console().print(table)
