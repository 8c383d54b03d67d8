"""Keeps a few answers that differ, shortened, for a person to look at: only if that was asked for.

One JSON file each, readable by the gateway's user alone, deleted when it is old. All of it runs in
a thread.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

from taut_service.config.settings import Examples, SettingsError
from taut_service.guard.compare import Comparison

_MODE = 0o600
_SUFFIX = ".example.json"


class ExampleFiles:
    """A folder of examples.

    Args:
        settings: where, how much, for how long.
        rng: draws which are kept; seeded by tests.

    Raises:
        SettingsError: the folder cannot be made or written to.
    """

    def __init__(self, settings: Examples, rng: random.Random | None = None) -> None:
        self._settings = settings
        self._rng = rng or random.Random()  # noqa: S311 - no secret
        folder = settings.directory
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SettingsError(
                f"guard.examples.directory: {folder}: {error.strerror or error}"
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise SettingsError(f"guard.examples.directory: {folder}: cannot be written to")

    def keep(self, model: str, variant: str, found: Comparison) -> Path | None:
        """Write one example, if it differs and is drawn; delete what is too old or too much.

        Args:
            model: public name.
            variant: that was compared.
            found: the comparison.

        Returns:
            The file, None if none was written.

        Raises:
            OSError: it cannot be written.
        """
        differs = found.first is not None or bool(found.why)
        if not differs or self._rng.random() >= self._settings.ratio:
            return None
        now, most = time.time(), self._settings.max_chars
        document = {
            "time": now,
            "model": model,
            "variant": variant,
            "kind": found.kind,
            "first_different_token": found.first,
            "why": found.why,
            "observations": found.values,
            # The end of a prompt is what an answer follows from.
            "prompt_end": found.prompt[-most:] if most else "",
            "answer_beginning": found.answer[:most],
        }
        file = self._settings.directory / f"{time.time_ns()}{_SUFFIX}"
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
        # Half of a surrogate pair, which JSON may hold, is written as JSON's own escape.
        with os.fdopen(opened, "w", encoding="utf-8", errors="backslashreplace") as stream:
            json.dump(document, stream, ensure_ascii=False)
        self._delete_old(now)
        return file

    def _delete_old(self, now: float) -> None:
        found = self._settings.directory.glob(f"*{_SUFFIX}")
        # Copies under other names are a person's.
        files = sorted(file for file in found if _written_at(file).isdecimal())
        for file in files[: -self._settings.max_files]:
            file.unlink(missing_ok=True)
        for file in files[-self._settings.max_files :]:
            if int(_written_at(file)) / 1e9 >= now - self._settings.keep_s:
                break
            file.unlink(missing_ok=True)


def _written_at(file: Path) -> str:
    return file.name.removesuffix(_SUFFIX)
