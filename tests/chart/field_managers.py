"""Server-side apply as Kubernetes documents it, for fields of maps; a list is one field.

Who applies owns what he gives; a value that another manager set and that differs is a conflict;
what he alone owned and gives no longer goes away. A plain change (kubectl scale, an autoscaler)
takes the fields that it changes.
"""

from __future__ import annotations

import copy
from typing import Any

Document = dict[str, Any]
Path = tuple[str, ...]
NOBODY_S = ("status", "apiVersion", "kind")


class ConflictError(Exception):
    """A field belongs to somebody else, who gave it another value."""


def fields(document: Document, prefix: Path = ()) -> dict[Path, Any]:
    """Leaves of a document by path."""
    found: dict[Path, Any] = {}
    for key, value in document.items():
        path = (*prefix, key)
        if path[0] in NOBODY_S or path[:2] == ("metadata", "managedFields"):
            continue
        if isinstance(value, dict) and value:
            found |= fields(value, path)
        else:
            found[path] = value
    return found


def applied(
    live: Document | None, given: Document, manager: str, *, force: bool = False
) -> Document:
    """The object after ``manager`` has applied ``given``.

    Raises:
        ConflictError: without ``force``, as kubectl and Helm would report it.
    """
    before = live or {}
    owners = _owners(before)
    mine = owners.pop((manager, "Apply", ""), set())
    wanted, have = fields(given), fields(before)
    for path, value in wanted.items():
        for (name, operation, subresource), theirs in owners.items():
            if path in theirs and have.get(path) != value:
                if not force:
                    where = f' with subresource "{subresource}"' if subresource else ""
                    raise ConflictError(f'conflict with "{name}"{where}: .{".".join(path)}')
                owners[name, operation, subresource] = theirs - {path}
    result = copy.deepcopy(before)
    for path, value in wanted.items():
        _set(result, path, value)
    left_alone = set().union(*owners.values()) if owners else set()
    for path in mine - wanted.keys() - left_alone:
        _unset(result, path)
    result |= {key: given[key] for key in ("apiVersion", "kind")}
    return _with_owners(result, {**owners, (manager, "Apply", ""): set(wanted)})


def changed_by(live: Document, manager: str, path: Path, value: Any) -> Document:
    """The object after ``manager`` has set one field through the scale subresource."""
    result = copy.deepcopy(live)
    _set(result, path, value)
    owners = {who: theirs - {path} for who, theirs in _owners(live).items()}
    owners[manager, "Update", "scale"] = {path}
    return _with_owners(result, owners)


def _owners(document: Document) -> dict[tuple[str, str, str], set[Path]]:
    entries = document.get("metadata", {}).get("managedFields", [])
    return {
        (each["manager"], each["operation"], each.get("subresource", "")): _read(each["fieldsV1"])
        for each in entries
    }


def _read(encoded: Document, prefix: Path = ()) -> set[Path]:
    found: set[Path] = set()
    for key, below in encoded.items():
        path = (*prefix, key.removeprefix("f:"))
        found |= _read(below, path) if below else {path}
    return found


def _with_owners(document: Document, owners: dict[tuple[str, str, str], set[Path]]) -> Document:
    entries = []
    for (manager, operation, subresource), paths in owners.items():
        encoded: Document = {}
        for path in sorted(paths):
            place = encoded
            for key in path:
                place = place.setdefault(f"f:{key}", {})
        entry = {"manager": manager, "operation": operation, "fieldsV1": encoded}
        entries.append({**entry, "subresource": subresource} if subresource else entry)
    document["metadata"]["managedFields"] = entries
    return document


def _set(document: Document, path: Path, value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(document.get(key), dict):
            document[key] = {}
        document = document[key]
    document[path[-1]] = copy.deepcopy(value)


def _unset(document: Document, path: Path) -> None:
    for key in path[:-1]:
        document = document.get(key, {})
    document.pop(path[-1], None)
