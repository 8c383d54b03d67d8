"""Where rollouts are remembered: the audit log, and the evidence of each rollout as counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Protocol

from taut_service.config.settings import RolloutSettings, SettingsError
from taut_service.rollout.audit import Entry


class JournalLostError(Exception):
    """It cannot be read or written now; nothing was changed. ``str()`` says why."""


class Journal(Protocol):
    """Kept in a file by one process, or in Redis by several."""

    entries: list[Entry]
    """All lines that were read so far, in order, the chain checked."""

    async def refresh(self) -> None:
        """Read what others have appended.

        Raises:
            JournalLostError: it cannot be reached, or was tampered with.
        """

    async def check(self) -> None:
        """Read the whole log again; it must be what ``entries`` say.

        Raises:
            JournalLostError: it is not, or cannot be reached.
        """

    async def append(self, entry: Entry) -> bool:
        """Append the line that follows the last of ``entries``.

        Returns:
            False if somebody else appended one meanwhile.

        Raises:
            JournalLostError: it cannot be written.
        """

    async def add_counts(self, key: str, counts: Mapping[str, int]) -> dict[str, int]:
        """Add to a rollout's evidence.

        Args:
            key: of the evidence.
            counts: to be added; may be empty.

        Returns:
            All counts, those of other gateways included.

        Raises:
            JournalLostError: it cannot be reached; whether it was added is not known.
        """

    async def forget(self, key: str, fields: Collection[str]) -> None:
        """Drop counts of a rollout's evidence that say nothing any more.

        Raises:
            JournalLostError: it cannot be reached.
        """

    async def close(self) -> None:
        """Write what waits to be written."""


def require_same(entries: Sequence[Entry], found: Sequence[str], place: str) -> None:
    """Insist that a log still begins with the lines that were read from it, or written to it.

    Args:
        entries: that are known.
        found: lines of the log now.
        place: of the log, for the error.

    Raises:
        JournalLostError: naming the first line that is missing or another one.
    """
    for entry, line in zip_longest(entries, found[: len(entries)]):
        if entry.line != line:
            state = "is gone" if line is None else "is another one"
            raise JournalLostError(
                f"{place}: line {entry.seq} {state} since it was read; put it back, or restart "
                "every gateway to go on from what is there"
            )


def build_journal(settings: RolloutSettings) -> Journal:
    """Make the journal that the configuration asks for.

    Raises:
        SettingsError: what it needs is not installed, or it cannot be read.
    """
    if settings.directory is not None:
        from taut_service.rollout.file_journal import FileJournal

        return FileJournal(settings.directory)
    try:
        from taut_service.rollout.redis_journal import RedisJournal
    except ModuleNotFoundError as error:
        raise SettingsError(
            "rollout.store: redis needs the Python package redis: pip install 'taut[redis]'"
        ) from error
    assert settings.redis is not None  # noqa: S101 - one of the two is given
    return RedisJournal(settings.redis)
