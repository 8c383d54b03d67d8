"""Rows of ``taut bench distil``: one JSON line each, and a Markdown table of them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from taut_deploy.documents import parse_json
from taut_deploy.errors import OutputError
from taut_deploy.files import disk_errors_named, write_text_atomically

_LINES, _TABLE = "distil.jsonl", "distil.md"
_RATIO, _KL = "perplexity_ratio", "mean_kl"


@dataclass(frozen=True)
class Row:
    """One student on one set of texts.

    Args:
        student: its name.
        what: it is.
        text: name of the set it was trained on.
        plan: hash of what the rows of one table share.
        one_shot: perplexity ratio and mean KL before training.
        made_seconds: that making it took.
        distilled: the same after training.
        tokens: trained on, repetitions counted.
        seconds: of training, loading and writing included.
        settings: of the training, where they differ from the defaults.
    """

    student: str
    what: str
    text: str
    plan: str
    one_shot: dict[str, float]
    made_seconds: float
    distilled: dict[str, float]
    tokens: int
    seconds: float
    settings: dict[str, Any]

    @property
    def recovered(self) -> float | None:
        """Share of the lost nats that training won back; None where nothing was lost."""
        lost = math.log(self.one_shot[_RATIO])
        return None if lost <= 0.0 else 1.0 - math.log(self.distilled[_RATIO]) / lost


def write_row(output: Path, row: Row) -> None:
    """Append a row to ``distil.jsonl``.

    Raises:
        OutputError: the disk is full or refuses.
    """
    with disk_errors_named(output / _LINES), (output / _LINES).open("a", encoding="utf-8") as sink:
        sink.write(json.dumps(asdict(row), sort_keys=True, allow_nan=False) + "\n")


def read_rows(output: Path, plan: str) -> list[Row]:
    """The rows of this plan that are in ``distil.jsonl``, the first of each student and text.

    Raises:
        OutputError: a line is none of ours.
    """
    file = output / _LINES
    if not file.is_file():
        return []
    found: dict[tuple[str, str], Row] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            row = Row(**parse_json(line, f"{file}:{number}", OutputError))
        except TypeError as error:
            raise OutputError(f"{file}:{number}: no row of 'taut bench distil'; move it") from error
        if row.plan == plan:
            found.setdefault((row.student, row.text), row)
    return list(found.values())


def markdown(rows: Sequence[Row], facts: Mapping[str, str]) -> str:
    """The table for people, under what it was measured with."""
    lines = [
        f"Measured with {', '.join(f'{name} {value}' for name, value in facts.items())}.",
        "",
        "| student | trained on | one shot: ratio, KL | distilled: ratio, KL | recovered | tokens "
        "| seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        before, after = (
            f"{values[_RATIO]:.4f}, {values[_KL]:.4f}" for values in (row.one_shot, row.distilled)
        )
        share = "-" if row.recovered is None else f"{row.recovered:.0%}"
        lines.append(
            f"| {row.what} | {row.text} | {before} | {after} | {share} | {row.tokens / 1e6:.2f} M "
            f"| {row.seconds:.0f} |"
        )
    return "\n".join([*lines, ""])


def write_table(output: Path, rows: Sequence[Row], facts: Mapping[str, str]) -> Path:
    """Write ``distil.md``; returns it.

    Raises:
        OutputError: the disk is full or refuses.
    """
    write_text_atomically(output / _TABLE, markdown(rows, facts))
    return output / _TABLE
