"""``fp4jax inspect``: a table of a checkpoint's tensors, and which kernel will use each."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from fp4jax.cli import options


def run_inspect(
    model: options.ModelPath = None,
    dtype: options.Dtype = None,
    every: Annotated[
        bool, typer.Option("--all", help="One line a tensor, layers not merged.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Show what a checkpoint holds and which kernel will use it. Reads no weights."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fp4jax.inspection import inspect_checkpoint

    found = inspect_checkpoint(options.checkpoint_path(model, quiet=False), dtype=dtype)
    nodes = found.nodes if every else found.collapsed()
    if as_json:
        print(json.dumps(dataclasses.asdict(dataclasses.replace(found, nodes=nodes)), indent=2))
        return
    console = Console()
    c = found.config
    console.print(f"{found.path}", highlight=False)
    console.print(
        f"{found.architecture}: {c.num_hidden_layers} layers, hidden {c.hidden_size}, "
        f"vocabulary {c.vocab_size}, context {c.max_position_embeddings}"
        f"{', tied head' if c.tie_word_embeddings else ''}; quantization {found.quantization}",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("tensor", "format"):
        table.add_column(name, overflow="fold")
    for name in ("shape", "count", "bytes"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("kernel", overflow="fold")
    for node in nodes:
        shape = "×".join(map(str, node.shape))
        name, form = node.path.removesuffix("/weight"), node.format.split()[0]
        table.add_row(name, form, shape, str(node.count), f"{node.nbytes:,}", node.kernel)
    table.add_section()
    table.add_row("total", "", "", str(len(found.nodes)), f"{found.nbytes:,}", "")
    console.print(table)
    for reason in dict.fromkeys(reason for _, reason in found.skipped):
        names = [name for name, why in found.skipped if why == reason]
        console.print(f"skipped {len(names)}: {reason} ({names[0]}, …)", highlight=False)
    for warning in found.warnings:
        console.print(f"warning: {warning}", highlight=False)
