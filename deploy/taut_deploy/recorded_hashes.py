"""Hashes of a directory's files, kept beside them so that unchanged files are not read again.

A file counts as unchanged while its size, its times of modification and of status change, and its
inode are those of when it was hashed. Programs can set the first time back, not the second. What
changes below the file system (a bad disk, a device that is written directly) only a full reading
finds. Whoever may write to the directory may write the record too: it saves time, it protects
nobody from them.
"""

import json
import os
import time
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from taut_deploy.documents import read_json
from taut_deploy.errors import CheckpointError, OutputError
from taut_deploy.files import in_order, sha256_open, write_json_atomically

Verification = Literal["recorded", "full"]
"""Trust the record where it fits, or read every file."""
RECORD = ".taut-hashes.json"
# Everybody who may read the files may read it: workers often run as another user.
_MODE = 0o644
# Of a file's times: what local file systems keep, and those that know whole seconds.
_TICK_NS = 20_000_000
_COARSE_TICK_NS = 2_000_000_000
# File systems that make up inode numbers anew when they are mounted.
_INODES_MADE_UP = ("fuse", "cifs", "smb", "9p")


@dataclass(frozen=True)
class _Hashed:
    """One file as it was when it was hashed; ``inode`` is None where the number means nothing."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int | None


@dataclass(frozen=True)
class _Record:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    format_version: Literal[1]
    files: dict[str, _Hashed]


_RECORD = TypeAdapter(_Record)


class RecordedHashes:
    """The sha256 of files in one directory, from their record where it still fits.

    Args:
        directory: of the files and of their record.
        verification: ``full`` reads every file whatever the record says.
    """

    def __init__(self, directory: Path, verification: Verification = "recorded") -> None:
        self._directory = directory
        self._kept = _read(directory / RECORD)
        self._full = verification == "full"
        self._stable_inodes = _has_stable_inodes(directory)
        self._known: dict[str, _Hashed] = {}
        self.read_bytes = 0
        """Bytes of the files that were read."""
        self.changed: list[str] = []
        """Files that the record knew by another hash."""

    def sha256(self, name: str) -> str:
        """Hex digest of one file.

        Args:
            name: of the file, relative to the directory.

        Raises:
            OSError: it cannot be read.
        """
        return dict(self.of([name]))[name]

    def of(self, names: Iterable[str]) -> Generator[tuple[str, str], None, None]:
        """Each file with its hex digest, in the order given; several are read at once.

        Args:
            names: of files, relative to the directory.

        Raises:
            OSError: one cannot be read.
        """
        with in_order(self._found, names) as found:
            for name, (digest, hashed, read) in found:
                kept = self._kept.get(name)
                if hashed is not None:
                    self._known[name] = hashed
                self.read_bytes += read
                if kept is not None and kept.sha256 != digest:
                    self.changed.append(name)
                yield name, digest

    def _found(self, name: str) -> tuple[str, _Hashed | None, int]:
        """A file's digest, what to keep of it, and how many bytes were read for that."""
        path, kept = self._directory / name, self._kept.get(name)
        if kept is not None and not self._full and kept == self._as_of(path.stat(), kept.sha256):
            return kept.sha256, kept, 0
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            _let_tick_pass(before)
            digest = sha256_open(file)
            after = os.fstat(file.fileno())
        hashed = self._as_of(after, digest)
        # Of a file that is being written nothing is kept.
        whole = hashed == self._as_of(before, digest)
        return digest, hashed if whole else None, after.st_size

    def save(self) -> str | None:
        """Keep what was asked for, and nothing else, for the next time.

        Returns:
            Why it cannot be kept, in words; None where it was, or was known before.
        """
        if self._known == self._kept:
            return None
        record = asdict(_Record(1, dict(sorted(self._known.items()))))
        try:
            write_json_atomically(self._directory / RECORD, record, mode=_MODE)
        except OutputError as error:
            number = getattr(error.__cause__, "errno", None)
            return str(error) if number is None else os.strerror(number)
        return None

    def _as_of(self, found: os.stat_result, digest: str) -> _Hashed:
        inode = found.st_ino if self._stable_inodes else None
        return _Hashed(digest, found.st_size, found.st_mtime_ns, found.st_ctime_ns, inode)


def _read(path: Path) -> dict[str, _Hashed]:
    """What is on record; nothing where the record is missing, damaged or of another version."""
    try:
        record = json.dumps(read_json(path, CheckpointError), allow_nan=False)
        return _RECORD.validate_json(record).files
    except (OSError, CheckpointError, ValidationError):
        return {}


def _let_tick_pass(found: os.stat_result) -> None:
    """Wait until a later write must show in the file's times, which go in ticks."""
    times = (found.st_mtime_ns, found.st_ctime_ns)
    coarse = all(instant % 1_000_000_000 == 0 for instant in times)
    tick = _COARSE_TICK_NS if coarse else _TICK_NS
    age = time.time_ns() - max(times)
    if age < tick:
        time.sleep(min(tick, tick - age) / 1e9)


def _has_stable_inodes(directory: Path) -> bool:
    """Whether a file keeps its inode number from one mount to the next, as far as Linux tells."""
    try:
        device = directory.stat().st_dev
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    except OSError:
        return True
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2:3] == [number]:
            return not file_system.startswith(_INODES_MADE_UP)
    return True
