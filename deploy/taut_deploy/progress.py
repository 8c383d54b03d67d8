"""Progress for long work: a bar on a terminal, plain lines elsewhere, nothing with ``--json``."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Called with steps done, steps in all, and what is being done.
Report = Callable[[int, int, str], None]


@contextmanager
def progress_reporter(quiet: bool = False) -> Iterator[Report]:
    """Yield a callback for ``(done, total, what)``; output goes to stderr.

    Args:
        quiet: report nothing.
    """
    if quiet:
        yield lambda done, total, what: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total, what: _print_line(f"[{done}/{total}] {what}")
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=what
        )


def _print_line(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
