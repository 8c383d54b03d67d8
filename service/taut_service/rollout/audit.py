"""The log of everything that happened to rollouts: one JSON line each, chained by hashes.

A line holds the SHA-256 of the line before it and its own, over its canonical JSON. Who changes,
removes or inserts a line breaks the chain there, and :func:`check_line` says where. Lines cut off
at the end leave a whole chain: keep the newest hash elsewhere (every webhook carries it). The state
of a rollout is that of the last line about its model, so state and log cannot disagree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from taut_service.rollout.state import Rollout, rollout_of

FIRST = "0" * 64
"""Stands for the line before the first."""
GATEWAY = "gateway"
"""Who did what nobody asked for."""


class TamperedError(Exception):
    """A line of the log is not what was written; ``str()`` names it."""


class Entry(NamedTuple):
    """One line.

    Args:
        seq: 1 for the first.
        event: what happened.
        hash: of this line.
        state: of the model's rollout from then on.
        line: the JSON text, without its end.
    """

    seq: int
    event: str
    hash: str
    state: Rollout
    line: str

    @property
    def document(self) -> dict[str, Any]:
        """Its fields."""
        document: dict[str, Any] = json.loads(self.line)
        return document


def write_line(
    after: Entry | None, event: str, actor: str, state: Rollout, facts: dict[str, Any]
) -> Entry:
    """Return the next line.

    Args:
        after: the last one, None for the first.
        event: what happened.
        actor: who did it.
        state: of the rollout from now on.
        facts: what the decision rested on.
    """
    document: dict[str, Any] = {
        "seq": 1 if after is None else after.seq + 1,
        "time": datetime.fromtimestamp(state.since, UTC).isoformat(timespec="milliseconds"),
        "event": event,
        "actor": actor,
        "state": state.as_json(),
        "facts": facts,
        "previous": FIRST if after is None else after.hash,
    }
    document["hash"] = _hash(document)
    return Entry(document["seq"], event, document["hash"], state, _canonical(document))


def check_line(after: Entry | None, line: str, place: str) -> Entry:
    """Read the line that follows another.

    Args:
        after: the one before it, None for the first.
        line: JSON text.
        place: of the log, for the error.

    Raises:
        TamperedError: it is not what was written there.
    """
    expected = 1 if after is None else after.seq + 1
    where = f"{place}: line {expected}"
    try:
        document = json.loads(line)
        told = document.pop("hash")
        if document["seq"] != expected:
            raise TamperedError(f"{where}: has the number {document['seq']!r}")
        if document["previous"] != (FIRST if after is None else after.hash):
            raise TamperedError(f"{where}: does not follow the line before it")
        if told != _hash(document):
            raise TamperedError(f"{where}: was changed: its hash does not match")
        return Entry(expected, str(document["event"]), told, rollout_of(document["state"]), line)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TamperedError(f"{where}: is no line of a rollout's log") from error


def check_lines(lines: Iterable[str], place: str, after: Entry | None = None) -> list[Entry]:
    """Read lines that follow another; raises TamperedError as :func:`check_line` does."""
    entries: list[Entry] = []
    for line in lines:
        after = check_line(after, line, place)
        entries.append(after)
    return entries


def verify_file(path: Path) -> list[Entry]:
    """Check a whole log.

    Raises:
        TamperedError: a line is not what was written.
        OSError: it cannot be read.
        UnicodeDecodeError: it is no text.
    """
    return check_lines(path.read_text(encoding="utf-8").splitlines(), str(path))


def _hash(document: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(document).encode()).hexdigest()


def _canonical(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
