"""Where Dynamo gives up: every break it logs, those before the first graph and in loops as well.

`torch._dynamo.explain` counts a break only where a graph ends at it. One before any operation, and
one in a loop, for which Dynamo runs the whole function as Python, would leave no trace; the log
artifact ``graph_breaks`` has a message for each.
"""

from __future__ import annotations

import linecache
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_MODULES = ("symbolic_convert", "convert_frame", "exc")
_PLACE = re.compile(r"\AGraph break .*?in user code at (.+):(\d+)$", re.MULTILINE)
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
# Dynamo's own function for what is left behind a break.
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")
_SKIPPED = ("Skipping the function", "results in a skip")
# What stands ahead of the reason proper, or of the user's stack behind it.
_AROUND = ("Encountered graph break when", "Failed to handle graph break", "User code traceback")


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A place where Dynamo gives up and lets Python run.

    Attributes:
        reason: why, in one line.
        where: ``file:line in function``, innermost of the user's frames.
        source: that line of code.
    """

    reason: str
    where: str
    source: str


@contextmanager
def logged() -> Iterator[list[GraphBreak]]:
    """Collect the breaks that Dynamo logs inside, whatever logging was set to before."""
    handler = _Collector()
    # As torch._logging names the logger of an artifact.
    loggers = [logging.getLogger(f"torch._dynamo.{name}.__graph_breaks") for name in _MODULES]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False  # to a user's terminal go our words
    try:
        yield handler.found
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[GraphBreak] = []

    def emit(self, record: logging.LogRecord) -> None:
        if (found := read(record.getMessage())) is not None:
            self.found.append(found)


def read(message: str) -> GraphBreak | None:
    """Read one message of the log; None where it is about something else.

    Args:
        message: as Dynamo logs it, several lines.
    """
    frames = _FRAME.findall(message)
    if place := _PLACE.search(message):
        file, line = place.group(1), place.group(2)
        reason = _reason(message[place.end() :])
    elif message.startswith("Graph break") and frames:
        file, line, _ = frames[-1]
        reason = message.splitlines()[0].partition(": ")[2]
    else:
        return None
    name = next((n for f, at, n in reversed(frames) if (f, at) == (file, line)), "")
    if any(word in message for word in _SKIPPED):
        reason += " (the whole function runs as Python)"
    name = _RESUMED.sub(r"\1", name)
    where = f"{file}:{line}" + (f" in {name}" if name else "")
    return GraphBreak(reason, where, linecache.getline(file, int(line)).strip())


def _reason(text: str) -> str:
    """Name the kind of break and Dynamo's explanation of it."""
    lines = [line.strip().removeprefix("Graph Break Reason: ") for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(_AROUND)]
    kind = lines[0] if lines else "unknown"
    for line in lines[1:]:
        if line.startswith("Explanation: "):
            return f"{kind}: {line.removeprefix('Explanation: ')}"
    return kind


def merged(found: Iterable[GraphBreak], reasons: Iterable[Any]) -> list[GraphBreak]:
    """Return each break once: those of the log, and what `torch._dynamo.explain` has besides.

    Args:
        found: of :func:`logged`.
        reasons: ``break_reasons`` of `torch._dynamo.explain`.
    """
    breaks = list(dict.fromkeys(found))
    places = {broken.where.partition(" in ")[0] for broken in breaks}
    for reason in reasons:
        text = str(reason.reason).strip().splitlines()
        first, frames = (text[0] if text else "unknown"), list(reason.user_stack)
        if not frames:
            breaks.append(GraphBreak(first, "unknown", ""))
            continue
        frame = frames[-1]
        place = f"{frame.filename}:{frame.lineno}"
        if place not in places:
            places.add(place)
            source = (frame.line or "").strip()
            breaks.append(GraphBreak(first, f"{place} in {frame.name}", source))
    return breaks
