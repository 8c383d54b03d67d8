"""Items of a task: a JSON object a line, read once, each mistake named by file and line.

A choice is scored by the likelihood of its text, an answer is written and matched::

    {"prompt": "Water boils at", "choices": [" 100 °C", " 10 °C"], "answer": 0}
    {"prompt": "2 + 2 =", "reference": "4"}
    {"prompt": "Who wrote Faust?", "reference": "(?i)goethe", "match": "regex", "max_tokens": 32}

``answer`` is the index of the right choice, or its text. ``subtask`` names the group of an item;
groups are what is resampled.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from taut_deploy.documents import MAX_BYTES, first_problem, parse_json, read_bounded
from taut_deploy.validate.errors import CouldNotValidateError

Match = Literal["exact", "contains", "regex"]
_Text = Annotated[str, Field(min_length=1)]


class Item(BaseModel):
    """One question; see the module."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: _Text
    choices: tuple[_Text, ...] | None = None
    answer: int | str | None = None
    reference: _Text | tuple[_Text, ...] | None = None
    match: Match = "exact"
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 32
    stop: tuple[_Text, ...] = ("\n",)
    subtask: str | None = None
    id: str | None = None

    @model_validator(mode="after")
    def _has_an_answer(self) -> "Item":
        if (self.choices is None) == (self.reference is None):
            raise ValueError("give 'choices' with 'answer', or 'reference'")
        if self.choices is not None:
            self._check_choices(self.choices)
        elif self.answer is not None:
            raise ValueError("'answer' goes with 'choices'; a text is given as 'reference'")
        elif self.match == "regex":
            for pattern in self.references:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"reference {pattern[:40]!r}: {error}") from error
        return self

    def _check_choices(self, choices: tuple[str, ...]) -> None:
        if len(choices) < 2:
            raise ValueError("'choices' needs two or more")
        if len(set(choices)) < len(choices):
            raise ValueError("'choices' has one text twice")
        if isinstance(self.answer, str) and self.answer in choices:
            return
        if not isinstance(self.answer, int) or not 0 <= self.answer < len(choices):
            raise ValueError(
                f"'answer' is the index of a choice, 0 to {len(choices) - 1}, or its text"
            )

    @property
    def right_choice(self) -> int:
        """Index of the right choice, of an item with choices."""
        assert self.choices is not None  # noqa: S101 - narrows the type
        if isinstance(self.answer, int):
            return self.answer
        return self.choices.index(str(self.answer))

    @property
    def references(self) -> tuple[str, ...]:
        """Texts of which one is to match."""
        reference = self.reference or ()
        return (reference,) if isinstance(reference, str) else reference


@dataclass(frozen=True, slots=True)
class TaskFile:
    """The items of a file.

    Args:
        name: of the task.
        path: of the file.
        sha256: hex digest of its bytes.
        items: in the file's order; all have choices, or all a reference.
    """

    name: str
    path: Path
    sha256: str
    items: tuple[Item, ...]

    @property
    def kind(self) -> Literal["choices", "generated"]:
        """How its items are scored."""
        return "choices" if self.items[0].choices is not None else "generated"


def read_task(path: Path, flag: str, name: str | None = None) -> TaskFile:
    """Read a task file.

    Args:
        path: JSON lines in UTF-8.
        flag: named in errors, with what follows it.
        name: of the task; the file's stem if left out.

    Raises:
        CouldNotValidateError: unreadable, no item in it, a wrong line, or both kinds mixed.
    """
    rows, digest = read_lines(path, flag)
    where = f"{flag} {path}"
    items = []
    for number, row in rows:
        try:
            items.append(Item.model_validate(row))
        except ValidationError as error:
            problem = first_problem(error, "item")
            raise CouldNotValidateError(f"{where}, line {number}: {problem}") from error
    refuse_repeated([(number, item) for (number, _), item in zip(rows, items, strict=True)], where)
    kinds = [item.choices is None for item in items]
    if len(set(kinds)) > 1:
        at = rows[kinds.index(not kinds[0])][0]
        raise CouldNotValidateError(
            f"{where}, line {at}: 'choices' and 'reference' in one file; make two of it"
        )
    return TaskFile(name or path.stem, path, digest, tuple(items))


def refuse_repeated(lines: Sequence[tuple[int, BaseModel]], where: str) -> None:
    """Refuse a question that is put twice: it would count as two that say the same.

    Args:
        lines: line number and what stands there.
        where: flag and file, to begin the error.

    Raises:
        CouldNotValidateError: naming both lines.
    """
    seen: dict[str, int] = {}
    for number, line in lines:
        first = seen.setdefault(line.model_dump_json(exclude={"id", "subtask"}), number)
        if first != number:
            raise CouldNotValidateError(
                f"{where}, line {number}: repeats line {first}; give each once, for what is asked "
                "twice counts twice"
            )


def read_lines(path: Path, flag: str) -> tuple[list[tuple[int, dict[str, Any]]], str]:
    """The objects of a file of JSON lines, with their line numbers, and the file's sha256.

    Raises:
        CouldNotValidateError: unreadable, empty, or a line that is no JSON object.
    """
    try:
        raw = read_bounded(path, MAX_BYTES, CouldNotValidateError)
    except OSError as error:
        raise CouldNotValidateError(f"{flag} {path}: {error.strerror or error}") from error
    rows = []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        row = parse_json(line, f"{flag} {path}, line {number}", CouldNotValidateError)
        if not isinstance(row, dict):
            raise CouldNotValidateError(f"{flag} {path}, line {number}: expected a JSON object")
        rows.append((number, row))
    if not rows:
        raise CouldNotValidateError(f"{flag} {path}: the file is empty; give one item a line")
    return rows, hashlib.sha256(raw).hexdigest()
