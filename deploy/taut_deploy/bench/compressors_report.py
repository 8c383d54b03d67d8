"""Rows of ``taut bench compressors``: one JSON line each, and a Markdown table of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from taut_deploy.bench.rows import Results, measured_with


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


RESULTS = Results("compressors", Row, lambda row: (row.format, row.method))


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
