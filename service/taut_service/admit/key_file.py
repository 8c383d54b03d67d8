"""API keys from a file, read again whenever it changes.

Two shapes, told apart by the name. ``*.yaml`` and ``*.yml``: a list of the same entries as
``api_keys``, or a mapping with only the key ``api_keys``. Any other name, such as a mounted secret:
one ``NAME SHA256`` a line, ``#`` begins a comment; such keys have every default.

A change is seen by polling what ``stat`` says of the file behind every symbolic link, so that a
Kubernetes secret, whose update swaps a link to a directory, is seen as well. The work is done in a
thread: a slow volume does not stop the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from taut_service.config.settings import ApiKey, SettingsError
from taut_service.config.settings.load import parse_yaml, read_text, reasons

logger = logging.getLogger(__name__)

POLL_S = 2.0
MAX_FILE_BYTES = 16 * 1024 * 1024
_ENTRIES: TypeAdapter[tuple[ApiKey, ...]] = TypeAdapter(
    Annotated[tuple[ApiKey, ...], Field(strict=False)]
)
Signature = tuple[int, int, int, int]
"""Device, inode, size and time of change in nanoseconds."""


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read a file of keys.

    Args:
        path: the file.

    Returns:
        Its keys, possibly none.

    Raises:
        SettingsError: it cannot be used; one line a mistake, none of which shows a key.
    """
    if _signature(path)[2] > MAX_FILE_BYTES:
        raise SettingsError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    text = read_text(path)
    if path.suffix in (".yaml", ".yml"):
        entries = parse_yaml(path, text)
        if isinstance(entries, dict) and set(entries) == {"api_keys"}:
            entries = entries["api_keys"]
        if entries is None:
            entries = []
        if not isinstance(entries, list):
            raise SettingsError(f"{path}: expected a list of keys, or a mapping with 'api_keys'")
    else:
        entries = _lines(path, text)
    try:
        return _ENTRIES.validate_python(entries)
    except ValidationError as error:
        raise SettingsError("\n".join(reasons(path, error))) from error


def _lines(path: Path, text: str) -> list[dict[str, str]]:
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2:
            # What stands there may be a key: it is not shown.
            raise SettingsError(f"{path}:{number}: expected 'NAME SHA256'")
        entries.append({"name": words[0], "sha256": words[1]})
    return entries


def _signature(path: Path) -> Signature:
    try:
        status = path.stat()
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from error
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("API keys are no longer watched: a defect", exc_info=error)


class KeyFileWatch:
    """Polls a file of keys and hands what it holds to its owner.

    Args:
        path: the file to watch now, None while there is none; asked at every round.
        install: takes the new keys over and says whether they differ from those in force; may
            raise :class:`SettingsError`.
        count: told ``True`` for every change taken over and ``False`` for every one refused.
        poll_s: pause between rounds.
    """

    def __init__(
        self,
        path: Callable[[], Path | None],
        install: Callable[[tuple[ApiKey, ...]], bool],
        count: Callable[[bool], None],
        poll_s: float = POLL_S,
    ) -> None:
        self._path = path
        self._install = install
        self._count = count
        self._poll_s = poll_s
        self._seen: tuple[Path, Signature] | None = None
        self._refused = ""

    def start(self) -> asyncio.Task[None]:
        """Begin to poll; the task ends when it is cancelled."""
        task = asyncio.get_running_loop().create_task(self._run())
        task.add_done_callback(_report)
        return task

    async def _run(self) -> None:
        while True:
            path = self._path()
            if path is not None:
                await self._look(path)
            await asyncio.sleep(self._poll_s)

    async def _look(self, path: Path) -> None:
        """Take a change over; a bad one is said once and the keys in force stay."""
        try:
            found = await asyncio.to_thread(self._read_if_changed, path)
            # A reload may have named another file meanwhile.
            if self._path() != path:
                return
            changed = False
            if found is not None:
                signature, keys = found
                self._seen = (path, signature)
                changed = self._install(keys)
        except SettingsError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                logger.error("the API keys in force stay: %s", error)
                self._count(False)
            return
        self._refused = ""
        if changed:
            logger.info("changed API keys from %s are in force", path)
            self._count(True)

    def _read_if_changed(self, path: Path) -> tuple[Signature, tuple[ApiKey, ...]] | None:
        # Asked before reading: what is written meanwhile then counts as the next change.
        signature = _signature(path)
        if self._seen == (path, signature):
            return None
        return signature, read_keys(path)
