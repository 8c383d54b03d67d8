"""Files that several processes write: each reader finds one of them whole."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step.

    Args:
        path: in a directory that is there.
        text: written as UTF-8.

    Raises:
        OSError: the directory cannot be written to.
    """
    # Containers that share the directory have equal process ids.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
