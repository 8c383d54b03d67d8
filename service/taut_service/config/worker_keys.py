"""Reads the keys that workers want, each from a file of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from taut_service.config.settings import Settings, SettingsError

MAX_KEY_BYTES = 8192
_KEY = re.compile(rb"[\x21-\x7e]+")

WorkerKeys = Mapping[Path, bytes]


def read_worker_keys(settings: Settings) -> WorkerKeys:
    """Read every ``workers[].api_key_file``.

    Args:
        settings: the configuration.

    Returns:
        The key of each file, without the space around it.

    Raises:
        SettingsError: a file cannot be read, or holds anything but one key; one line a file.
    """
    paths = {worker.api_key_file for model in settings.models for worker in model.every_worker()}
    keys: dict[Path, bytes] = {}
    problems = []
    for path in sorted(path for path in paths if path is not None):
        try:
            with path.open("rb") as file:
                key = file.read(MAX_KEY_BYTES + 1).strip()
        except OSError as error:
            problems.append(f"{path}: api_key_file: {error.strerror}")
            continue
        if _KEY.fullmatch(key) is None or len(key) > MAX_KEY_BYTES:
            problems.append(f"{path}: api_key_file: must hold one key of visible ASCII characters")
        keys[path] = key
    if problems:
        raise SettingsError("\n".join(problems))
    return keys
