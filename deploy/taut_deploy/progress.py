"""Progress for long work: a bar on a terminal, plain lines elsewhere, nothing with ``--json``."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

# Called with steps done, steps in all, and what is being done.
Report = Callable[[int, int, str], None]
# Called with one line for the user.
Say = Callable[[str], None]
_LONGEST_SILENCE_S = 30.0
# Columns of a terminal below which bar and remaining time leave room to the rest.
_NARROW = 60
_BAR = 20


def no_report(done: int, total: int, what: str) -> None:
    """Report nothing."""


@contextmanager
def progress_reporter(quiet: bool = False) -> Iterator[Report]:
    """Yield a callback for ``(done, total, what)``; output goes to stderr.

    Args:
        quiet: report nothing.
    """
    if quiet:
        yield no_report
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        with _Lines() as lines:
            yield lines.report
        return
    with Progress(*_columns(console.width), console=console, transient=True, expand=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=what
        )


def _columns(width: int) -> tuple[ProgressColumn, ...]:
    """What a line shows; where it is narrow the description is cut, never the figures."""

    def whole() -> Column:
        return Column(no_wrap=True)

    what = TextColumn(
        "{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
    )
    figures = (MofNCompleteColumn(table_column=whole()), TimeElapsedColumn(table_column=whole()))
    if width < _NARROW:
        return (*figures, what)
    return (
        what,
        BarColumn(_BAR, table_column=whole()),
        *figures,
        TimeRemainingColumn(table_column=whole()),
    )


class _Lines:
    """One line for each report, and the last one again where nothing new came for long."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._last = ""
        self._began = self._said = time.monotonic()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> "_Lines":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def report(self, done: int, total: int, what: str) -> None:
        """Print a line."""
        with self._lock:
            self._last = f"[{done}/{total}] {what}"
            self._began = self._said = time.monotonic()
            _print_line(self._last)

    def _repeat(self) -> None:
        while not self._ended.wait(_LONGEST_SILENCE_S / 4):
            with self._lock:
                now = time.monotonic()
                if self._last and now - self._said >= _LONGEST_SILENCE_S:
                    self._said = now
                    _print_line(f"{self._last} ({now - self._began:.0f} s so far)")


def _print_line(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
