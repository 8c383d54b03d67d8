"""Results as lines of JSON that outlive the run, and the first line of the table of them."""

import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from taut_deploy.documents import parse_json
from taut_deploy.errors import OutputError
from taut_deploy.files import disk_errors_named


class PlannedRow(Protocol):
    """A dataclass with the hash of what the rows of one table share."""

    @property
    def plan(self) -> str:
        """That hash."""


RowType = TypeVar("RowType", bound=PlannedRow)


def append_row(file: Path, row: Any) -> None:
    """Append a dataclass to a file of lines.

    Raises:
        OutputError: the disk is full or refuses.
    """
    with disk_errors_named(file), file.open("a", encoding="utf-8") as sink:
        sink.write(json.dumps(asdict(row), sort_keys=True, allow_nan=False) + "\n")


def rows_of(
    file: Path, kind: type[RowType], plan: str, command: str, key: Callable[[RowType], Hashable]
) -> list[RowType]:
    """The rows of one plan in a file of lines, the first of each key.

    Args:
        file: that need not exist.
        kind: dataclass of a line.
        plan: hash that the rows have.
        command: that writes them, for the message.
        key: what makes two rows the same.

    Raises:
        OutputError: a line is no such row.
    """
    if not file.is_file():
        return []
    found: dict[Hashable, RowType] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            row = kind(**parse_json(line, f"{file}:{number}", OutputError))
        except TypeError as error:
            raise OutputError(f"{file}:{number}: no row of '{command}'; move it") from error
        if row.plan == plan:
            found.setdefault(key(row), row)
    return list(found.values())


def measured_with(facts: Mapping[str, str]) -> str:
    """The sentence over a table: command, hardware, versions, date."""
    return f"Measured with {', '.join(f'{name} {value}' for name, value in facts.items())}."
