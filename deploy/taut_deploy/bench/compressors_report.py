"""Rows of ``taut bench compressors``: one JSON line each, and a Markdown table of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from taut_deploy.bench.rows import append_row, measured_with, rows_of
from taut_deploy.files import write_text_atomically

_LINES, _TABLE = "compressors.jsonl", "compressors.md"


@dataclass(frozen=True)
class Row:
    """One method in one format.

    Args:
        method: whose and which.
        format: of the weights.
        plan: hash of what the rows of one table share.
        judged: perplexity ratio and mean KL to the base.
        seconds: of compression, loading and writing included.
        version: of what compressed.
    """

    method: str
    format: str
    plan: str
    judged: dict[str, float]
    seconds: float
    version: str


def write_row(output: Path, row: Row) -> None:
    """Append a row to ``compressors.jsonl``.

    Raises:
        OutputError: the disk is full or refuses.
    """
    append_row(output / _LINES, row)


def read_rows(output: Path, plan: str) -> list[Row]:
    """The rows of this plan that are in ``compressors.jsonl``, the first of each method and format.

    Raises:
        OutputError: a line is none of ours.
    """
    return rows_of(
        output / _LINES, Row, plan, "taut bench compressors", lambda row: (row.format, row.method)
    )


def markdown(rows: Sequence[Row], facts: Mapping[str, str]) -> str:
    """The table for people, under what it was measured with; the best KL of a format in bold."""
    lines = [
        measured_with(facts),
        "",
        "| format | method | perplexity ratio | mean KL, nats | seconds | version |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        kl = row.judged["mean_kl"]
        best = min(one.judged["mean_kl"] for one in rows if one.format == row.format)
        shown = f"**{kl:.4f}**" if kl == best else f"{kl:.4f}"
        lines.append(
            f"| {row.format} | {row.method} | {row.judged['perplexity_ratio']:.4f} | {shown} "
            f"| {row.seconds:.0f} | {row.version} |"
        )
    return "\n".join([*lines, ""])


def write_table(output: Path, rows: Sequence[Row], facts: Mapping[str, str]) -> Path:
    """Write ``compressors.md``; returns it.

    Raises:
        OutputError: the disk is full or refuses.
    """
    write_text_atomically(output / _TABLE, markdown(rows, facts))
    return output / _TABLE
