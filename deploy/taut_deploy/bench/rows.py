"""Results as lines of JSON that outlive the run, and the table of them."""

import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from taut_deploy.documents import parse_json
from taut_deploy.errors import OutputError
from taut_deploy.files import disk_errors_named, write_text_atomically


class PlannedRow(Protocol):
    """A dataclass with the hash of what the rows of one table share."""

    @property
    def plan(self) -> str:
        """That hash."""


RowType = TypeVar("RowType", bound=PlannedRow)


class Results(Generic[RowType]):
    """The files of ``taut bench NAME``: ``NAME.jsonl``, a row on each line, and ``NAME.md``.

    Args:
        name: of the bench.
        kind: dataclass of a row.
        key: what makes two rows of one plan the same.
    """

    def __init__(self, name: str, kind: type[RowType], key: Callable[[RowType], Hashable]) -> None:
        self._name, self._kind, self._key = name, kind, key

    def append(self, output: Path, row: RowType) -> None:
        """Put a row on the disk.

        Raises:
            OutputError: the disk is full or refuses.
        """
        file = output / f"{self._name}.jsonl"
        line = json.dumps(asdict(cast("Any", row)), sort_keys=True, allow_nan=False)
        with disk_errors_named(file), file.open("a", encoding="utf-8") as sink:
            sink.write(line + "\n")

    def read(self, output: Path, plan: str) -> list[RowType]:
        """The rows of one plan that are there, the first of each key.

        Raises:
            OutputError: a line is no such row.
        """
        file = output / f"{self._name}.jsonl"
        if not file.is_file():
            return []
        found: dict[Hashable, RowType] = {}
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            try:
                row = self._kind(**parse_json(line, f"{file}:{number}", OutputError))
            except TypeError as error:
                raise OutputError(
                    f"{file}:{number}: no row of 'taut bench {self._name}'; move it"
                ) from error
            if row.plan == plan:
                found.setdefault(self._key(row), row)
        return list(found.values())

    def write_table(self, output: Path, text: str) -> Path:
        """Write the table for people; returns its file.

        Raises:
            OutputError: the disk is full or refuses.
        """
        file = output / f"{self._name}.md"
        write_text_atomically(file, text)
        return file


def measured_with(facts: Mapping[str, str]) -> str:
    """The sentence over a table: command, hardware, versions, date."""
    return f"Measured with {listed(facts)}."


def listed(facts: Mapping[str, str]) -> str:
    """Facts of a machine or a run in one line, each behind its name."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())
