"""The journal of a single gateway: ``audit.jsonl`` and ``evidence.json`` in one folder.

A line is written and synced before what it says comes into force. A process that dies while it
writes leaves a line without an end: it never came into force and is cut off at the next start.
Who removes or changes the log meanwhile stops the rollouts: what is written must be found again.
Evidence is replaced as a whole, every few seconds; a crash loses that much of it.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from taut_service.config.settings import SettingsError
from taut_service.guard.evidence import Evidence
from taut_service.rollout.audit import Entry, TamperedError, check_lines
from taut_service.rollout.journal import JournalLostError, require_same

logger = logging.getLogger(__name__)
AUDIT, EVIDENCE = "audit.jsonl", "evidence.json"
SAVE_S = 2.0
_MODE = 0o600


def _locked(path: Path) -> io.FileIO:
    """Open a log to append to it; BlockingIOError if another gateway has it."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _MODE)
    # Without a buffer: it would keep what a full disk did not take, and write it later.
    file = os.fdopen(opened, "r+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    return file


class _Look(NamedTuple):
    """Of a file, without reading it."""

    device: int
    inode: int
    size: int
    changed_ns: int


class FileJournal:
    """A :class:`.journal.Journal` in a folder; locked against a second gateway.

    Args:
        folder: made if it is missing.

    Raises:
        SettingsError: it cannot be used, another gateway uses it, or its log was tampered with.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.entries: list[Entry] = []
        self._file: io.FileIO | None = None
        self._counts: dict[str, Counter[str]] = {}
        self._dirty = False
        self._saved_at = 0.0
        self._seen: _Look | None = None
        try:
            self._open()
        except OSError as error:
            where = error.filename or self._folder
            text = f"rollout.directory: {where}: {error.strerror or error}"
            raise SettingsError(text) from error
        except TamperedError as error:
            raise SettingsError(
                f"rollout.directory: {error}; move the file away to begin a new log"
            ) from error

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / AUDIT
        try:
            self._file = _locked(path)
        except BlockingIOError as error:
            raise SettingsError(
                f"rollout.directory: {self._folder}: another gateway uses it; share a rollout "
                "with 'store: redis'"
            ) from error
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            logger.error("rollout: %s: a line that was never finished is cut off", path)
            self._file.truncate(len(whole))
        try:
            text = whole.decode("ascii")
        except UnicodeDecodeError as error:
            line = whole[: error.start].count(b"\n") + 1
            raise TamperedError(f"{path}: line {line}: is no line of a rollout's log") from error
        self.entries = check_lines(text.splitlines(), str(path))
        self._seen = self._look()
        self._counts = self._load_counts()

    def _load_counts(self) -> dict[str, Counter[str]]:
        path = self._folder / EVIDENCE
        try:
            found = json.loads(path.read_bytes())
            counts = {key: Counter({k: int(v) for k, v in c.items()}) for key, c in found.items()}
            for held in counts.values():
                Evidence({}, held)  # whether they are counts of evidence
            return counts
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError, TypeError, OverflowError):
            # Only means longer waiting; the log says what was decided.
            logger.error("rollout: %s cannot be read: evidence begins anew", path)
            return {}

    async def refresh(self) -> None:
        """Look after the log, save evidence that waits; nobody else appends."""
        if self._look() != self._seen:
            await self.check()
        if self._dirty and time.monotonic() - self._saved_at >= SAVE_S:
            await self._save()

    async def check(self) -> None:
        """Read the file again, under its name."""
        path, look = self._folder / AUDIT, self._look()
        try:
            data = await asyncio.to_thread(path.read_bytes)
        except OSError as error:
            raise JournalLostError(f"{path}: {error.strerror}") from error
        lines = data.decode("ascii", "replace").splitlines()
        require_same(self.entries, lines, str(path))
        if len(lines) > len(self.entries):
            raise JournalLostError(
                f"{path}: somebody else writes it; restart the gateway to go on from what is there"
            )
        if look is None or not self._writes_to(look):
            self._go_on_in(path)
        self._seen = look

    def _go_on_in(self, path: Path) -> None:
        """Write to a file that was put in the place of this gateway's, with the same lines."""
        try:
            copy = _locked(path)
        except OSError as error:
            raise JournalLostError(f"{path}: {error.strerror}") from error
        if self._file is not None:
            self._file.close()
        self._file = copy

    def _look(self) -> _Look | None:
        """What tells that the file under the log's name was changed; None without one."""
        try:
            found = (self._folder / AUDIT).stat()
        except OSError:
            return None
        return _Look(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def _writes_to(self, look: _Look) -> bool:
        assert self._file is not None  # noqa: S101 - opened at the start
        ours = os.fstat(self._file.fileno())
        return (look.device, look.inode) == (ours.st_dev, ours.st_ino)

    async def append(self, entry: Entry) -> bool:
        """Write a line and sync it."""
        try:
            await asyncio.to_thread(self._write, entry.line)
        except OSError as error:
            raise JournalLostError(f"{self._folder / AUDIT}: {error.strerror}") from error
        finally:
            self._seen = self._look()
        self.entries.append(entry)
        return True

    def _write(self, line: str) -> None:
        assert self._file is not None  # noqa: S101 - opened at the start
        size, left = self._file.seek(0, os.SEEK_END), line.encode() + b"\n"
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError:
            # Half a line must not be continued by the next.
            self._file.truncate(size)
            raise

    async def add_counts(self, key: str, counts: Mapping[str, int]) -> dict[str, int]:
        """Add to evidence; it is saved a little later."""
        held = self._counts.get(key)
        if held is None:
            # Evidence of rollouts that are over is not needed again.
            kept = {entry.state.id for entry in self.entries[-100:]}
            self._counts = {k: c for k, c in self._counts.items() if k.split("|")[0] in kept}
            held = self._counts[key] = Counter()
        if counts:
            held.update(counts)
            self._dirty = True
        return dict(held)

    async def forget(self, key: str, fields: Collection[str]) -> None:
        """Drop counts."""
        for field in fields:
            self._counts.get(key, Counter()).pop(field, None)
        self._dirty = True

    async def _save(self) -> None:
        document = json.dumps(self._counts)
        self._dirty, self._saved_at = False, time.monotonic()
        try:
            await asyncio.to_thread(self._replace, document)
        except OSError as error:
            self._dirty = True
            raise JournalLostError(f"{self._folder / EVIDENCE}: {error.strerror}") from error

    def _replace(self, text: str) -> None:
        path = self._folder / EVIDENCE
        half = path.with_suffix(".new")
        opened = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _MODE)
        with os.fdopen(opened, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        half.replace(path)

    async def close(self) -> None:
        """Save evidence and unlock."""
        try:
            if self._dirty:
                await self._save()
        finally:
            if self._file is not None:
                self._file.close()
