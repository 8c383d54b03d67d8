"""Durable files: everything is written beside its final place, flushed, and renamed into it."""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from taut_deploy.errors import OutputError

Named = TypeVar("Named")
Found = TypeVar("Found")

_CHUNK = 1 << 20
# A core hashes 1 GB/s: so many are faster than most disks.
_FILES_AT_ONCE = 8
# Of the 255 bytes of a file name, less what is put around it (".NAME.partial", ".NAME.lock").
_MAX_OUTPUT_NAME = 200
# Volatile by nature (wall clock, host): never part of a digest, so that a resumed run equals an
# undisturbed one.
VOLATILE_FILES = frozenset({"compression_log.json", "report.html"})
# Of one compression: another that starts from its result does not take it along.
COMPRESSION_REPORT = "report.md"


def sha256_file(path: Path) -> str:
    """Hex digest of one file's bytes."""
    with path.open("rb") as file:
        return sha256_open(file)


def sha256_files(files: Iterable[Path]) -> dict[Path, str]:
    """Hex digests of several files, of which some are read at once."""
    with in_order(sha256_file, files) as found:
        return dict(found)


def sha256_open(file: BinaryIO) -> str:
    """Hex digest of the bytes from where an open file stands to its end."""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def in_order(
    function: Callable[[Named], Found], given: Iterable[Named]
) -> Iterator[Iterator[tuple[Named, Found]]]:
    """Each of the given with what a function finds, in their order; several are worked on at once.

    For functions that read files: hashing leaves the interpreter to other threads. What was not
    begun when the block ends is not done.
    """
    asked = list(given)
    at_once = max(1, min(_FILES_AT_ONCE, os.cpu_count() or 1, len(asked)))
    pool = ThreadPoolExecutor(at_once, "files")
    try:
        yield zip(asked, pool.map(function, asked), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


def sha256_json(value: Any) -> str:
    """Hex digest of a value's canonical JSON (sorted keys, no white space)."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def digest_of_hashes(hashes: dict[str, str]) -> str:
    """One digest for a set of files: ``sha256:`` over the sorted ``{path: sha256}`` mapping."""
    return "sha256:" + sha256_json(hashes)


def fsync_path(path: Path) -> None:
    """Flush a finished file, or make the renames inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text_atomically(path: Path, text: str, mode: int | None = None) -> None:
    """Write ``text``; see :func:`write_bytes_atomically`."""
    write_bytes_atomically(path, text.encode(), mode)


def write_bytes_atomically(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write ``content`` so that a reader sees either the old file or the whole new one.

    Args:
        path: the file.
        content: all of it.
        mode: its permissions; None leaves them to the umask.

    Raises:
        OutputError: the disk cannot take it; the old file, if any, is still there.
    """
    with replaced_atomically(path, mode) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replaced_atomically(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Give a temporary file to write, which then takes the place of ``path``, flushed.

    Args:
        path: the file.
        mode: its permissions; None leaves them to the umask.

    Raises:
        OutputError: the disk cannot take it; the old file, if any, is still there.
    """
    # Not by process id alone: containers that share a volume have the same ones.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with disk_errors_named(path):
        try:
            yield temporary
            if mode is not None:
                temporary.chmod(mode)
            fsync_path(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_path(path.parent)


def write_json_atomically(path: Path, value: Any, mode: int | None = None) -> None:
    """Write ``value`` as indented, key-sorted JSON; see :func:`write_bytes_atomically`.

    Raises:
        OutputError: it holds NaN or infinity, which JSON cannot, or the disk cannot take it.
    """
    if (place := place_not_finite(value)) is not None:
        raise OutputError(f"{path}: {place} is not a finite number; nothing was written")
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_text_atomically(path, text + "\n", mode)


def place_not_finite(value: Any, where: str = "") -> str | None:
    """The first place in plain data that holds NaN or infinity, which JSON lacks; None if none."""
    if isinstance(value, float):
        return None if math.isfinite(value) else where
    items: Iterable[tuple[object, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    found = (
        place_not_finite(inner, f"{where}.{key}" if where else str(key)) for key, inner in items
    )
    return next((place for place in found if place), None)


def checked_output(output: Path) -> Path:
    """A directory to be made, as an absolute path with a name that others can be derived from.

    Raises:
        OutputError: it has no name, one that is too long, or control characters in it, or nothing
            can be made at its place.
    """
    absolute = Path(os.path.abspath(output))  # noqa: PTH100 - 'a/..' is resolved, links are not
    if not absolute.name or not str(absolute).isprintable():
        raise OutputError(f"--output {str(output)!r}: not a name for a directory")
    if len(os.fsencode(absolute.name)) > _MAX_OUTPUT_NAME:
        raise OutputError(
            f"--output {absolute.name[:40]}…: the name is longer than {_MAX_OUTPUT_NAME} bytes"
        )
    with disk_errors_named(absolute):
        _require_room_for_a_name(absolute)
    return absolute


def _require_room_for_a_name(path: Path) -> None:
    """Raise what making a directory would."""
    if path.exists():
        return
    nearest = next(parent for parent in path.parents if parent.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def copy_files(paths: Iterable[Path], source: Path, target: Path) -> None:
    """Copy files of one directory to the same places in another; folders are made if need be.

    Raises:
        OutputError: the disk is full or refuses; names the file.
    """
    for path in paths:
        copy = target / path.relative_to(source)
        with disk_errors_named(copy):
            if not copy.parent.is_dir():
                copy.parent.mkdir(parents=True)
            shutil.copyfile(path, copy)


@contextlib.contextmanager
def disk_errors_named(path: Path) -> Iterator[None]:
    """Turn a full disk, a quota or missing rights under ``path`` into one readable line."""
    try:
        yield
    except OSError as error:
        reasons = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EACCES: "permission denied",
            errno.EROFS: "the file system is read-only",
            errno.ENOTDIR: "a part of the path is a file",
            errno.EEXIST: "a part of the path is a file",
            errno.EISDIR: "it is a directory",
            errno.ENAMETOOLONG: "the name is too long",
        }
        if error.errno not in reasons:
            raise
        raise OutputError(
            f"cannot write {path}: {reasons[error.errno]}; "
            "nothing half-written was left in its place"
        ) from error


@contextlib.contextmanager
def safetensors_disk_errors() -> Iterator[None]:
    """Turn what safetensors raises for a full disk into the ``OSError`` that it was.

    Raises:
        OSError: with the number in its message.
    """
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def require_free_space(
    directory: Path, needed_bytes: int, way_out: str = "choose another --output"
) -> None:
    """Refuse before the work rather than after it.

    Args:
        directory: that is to hold the result; need not exist.
        needed_bytes: how much that is.
        way_out: what the user can do besides freeing space.

    Raises:
        OutputError: if the file system of ``directory`` has less than ``needed_bytes`` free.
    """
    existing = directory
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise OutputError(
            f"{directory}: needs about {needed_bytes / 1e6:.0f} MB but the disk has "
            f"{free / 1e6:.0f} MB free; free some space or {way_out}"
        )
