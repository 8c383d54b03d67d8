"""The one place that removes directories: single children that taut made, known by a marker."""

import contextlib
import shutil
from collections.abc import Collection
from pathlib import Path

from taut_deploy.errors import OutputError


def remove_child(parent: Path, name: str, markers: Collection[str]) -> None:
    """Remove the directory ``parent / name``, which taut made.

    The markers go last: a removal that is killed leaves what the next one recognises. What others
    remove at the same time is no error.

    Args:
        parent: where taut makes directories of its own.
        name: of the child, one part of a path.
        markers: names inside it; one of them says that the child is taut's. An empty one may be
            removed without.

    Raises:
        OutputError: it is no direct child, a link, no directory or without a marker; nothing was
            removed.
    """
    child = parent / name
    if name in {"", ".", ".."} or Path(name).name != name or child.parent != parent:
        raise OutputError(f"{name!r}: not the name of one directory in {parent}; nothing removed")
    if child.is_symlink() or not child.is_dir():
        raise OutputError(f"{child}: not a directory that taut made; move it away")
    entries = list(child.iterdir())
    if entries and not any(entry.name in markers for entry in entries):
        raise OutputError(
            f"{child}: was not made by taut (it holds no {' or '.join(sorted(markers))}); "
            "move it away"
        )
    for entry in sorted(entries, key=lambda entry: entry.name in markers):
        _remove_entry(entry)
    with contextlib.suppress(FileNotFoundError):
        child.rmdir()


def _remove_entry(entry: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        # A link is removed, never followed.
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def is_own_child(child: Path, markers: Collection[str]) -> bool:
    """Whether :func:`remove_child` would remove ``child``."""
    if child.is_symlink() or not child.is_dir():
        return False
    names = [entry.name for entry in child.iterdir()]
    return not names or any(name in markers for name in names)
