"""The command's entry: its subcommands, and how errors and Ctrl-C end it."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from fp4jax.cli.bench import run_bench
from fp4jax.cli.cache_prompt import run_cache_prompt
from fp4jax.cli.chat import run_chat
from fp4jax.cli.generate import run_generate
from fp4jax.cli.inspect import run_inspect
from fp4jax.cli.perplexity import run_perplexity
from fp4jax.cli.quantize import run_quantize
from fp4jax.errors import CheckpointWarning, Fp4JaxError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def make_app() -> typer.Typer:
    """The command with all its subcommands."""
    app = typer.Typer(
        name="fp4jax",
        help="Run NVFP4 (4-bit) language models with JAX.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for name, command in (
        ("generate", run_generate),
        ("chat", run_chat),
        ("cache-prompt", run_cache_prompt),
        ("quantize", run_quantize),
        ("inspect", run_inspect),
        ("bench", run_bench),
        ("perplexity", run_perplexity),
    ):
        app.command(name)(_ending(command))
    app.callback()(_root)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: arguments after the program's name; default ``sys.argv``.

    Returns:
      Exit status: 0; 1 for an error of this package, told in one line; 2 for bad usage; 130 after
      Ctrl-C.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("default", CheckpointWarning)
        warnings.showwarning = _show_warning
        try:
            make_app()(None if argv is None else list(argv), prog_name="fp4jax")
        except SystemExit as ending:
            return ending.code if isinstance(ending.code, int) else OK
    return OK


def _ending(command: Callable[..., None]) -> Callable[..., None]:
    """``command``, with what may end it early turned into exit statuses."""

    @functools.wraps(command)
    def run(*args: object, **kwargs: object) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except Fp4JaxError as error:
            print(f"fp4jax: error: {error}", file=sys.stderr)
            raise typer.Exit(FAILED) from None
        except BrokenPipeError:  # the reader (head, less) has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None

    return run


def _version(asked: bool) -> None:
    if asked:
        from fp4jax import __version__

        print(f"fp4jax {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_version),
    ] = False,
) -> None:
    """Run NVFP4 (4-bit) language models with JAX."""


def _show_warning(message, category, *_: object, **__: object) -> None:
    kind = "warning" if issubclass(category, CheckpointWarning) else category.__name__
    print(f"fp4jax: {kind}: {message}", file=sys.stderr)
