"""Progress bars on the error stream."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[str, int, int], None]
"""Told about long work: a stage, what is done of it, and the total."""


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """A reporter ``(stage, done, total)`` that draws one bar a stage and clears it at the end."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:

        def report(stage: str, done: int, total: int) -> None:
            known = {task.description: task.id for task in bar.tasks}
            task = known.get(stage)
            if task is None:
                task = bar.add_task(stage, total=total)
            bar.update(task, completed=done, total=total)

        yield report
