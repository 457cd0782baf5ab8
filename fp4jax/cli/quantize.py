"""``fp4jax quantize``: a bf16 checkpoint to an NVFP4 one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fp4jax.cli import options


def run_quantize(
    source: Annotated[Path, typer.Option("--model", help="Checkpoint folder to read.")],
    target: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; must be new.")],
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            help="Modules to leave alone, in place of lm_head: names or wildcards; repeatable.",
        ),
    ] = None,
    format: Annotated[
        str, typer.Option("--format", help="modelopt or compressed-tensors.")
    ] = "modelopt",
    quiet: options.Quiet = False,
) -> None:
    """Quantize a checkpoint's linear layers to NVFP4. Nothing is left behind if interrupted."""
    from fp4jax.checkpoints.writer import quantize_checkpoint

    with options.shown(quiet) as report:
        quantize_checkpoint(
            source,
            target,
            exclude=exclude,
            format=format,
            progress=report,
        )
    if not quiet:
        sizes = [
            sum(f.stat().st_size for f in folder.glob("*.safetensors"))
            for folder in (source, target)
        ]
        print(
            f"{target}: {sizes[1] / 1e6:.1f} MB of weights, from {sizes[0] / 1e6:.1f} MB",
            file=sys.stderr,
        )
