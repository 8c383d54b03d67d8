"""Markdown tables and what may stand in their cells."""

from collections.abc import Sequence


def cell(text: str) -> str:
    """Inline code that survives a table cell: one line, no bars, no backticks."""
    shown = text.replace("\n", "⏎").replace("\r", "␍").replace("\t", "⇥")
    return "`" + shown.replace("|", "¦").replace("`", "ˋ") + "`"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table of ready cells."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
