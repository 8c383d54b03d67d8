"""Where rollouts are remembered: the audit log, and the evidence of each rollout as counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
