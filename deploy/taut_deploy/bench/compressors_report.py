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
        judged: perplexity ratio and mean KL to the base, and the ends of their intervals.
        seconds: of compression, loading and writing included.
        version: of what compressed, and a rival's settings.
    """

    method: str
    format: str
    plan: str
    judged: dict[str, float]
    seconds: float
    version: str


RESULTS = Results("compressors", Row, lambda row: (row.format, row.method))


def markdown(rows: Sequence[Row], facts: Mapping[str, str]) -> str:
    """The table for people, under what it was measured with; the best KL of a format in bold.

    In brackets are intervals of 95 % over the judged sequences.
    """
    lines = [
        measured_with(facts),
        "",
        "| format | method | perplexity ratio | mean KL, nats | seconds | version |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        best = min(one.judged["mean_kl"] for one in rows if one.format == row.format)
        kl = _shown(row, "mean_kl", bold=row.judged["mean_kl"] == best)
        lines.append(
            f"| {row.format} | {row.method} | {_shown(row, 'perplexity_ratio')} | {kl} "
            f"| {row.seconds:.0f} | {row.version} |"
        )
    return "\n".join([*lines, ""])


def _shown(row: Row, name: str, *, bold: bool = False) -> str:
    mark = "**" if bold else ""
    low, high = row.judged[f"{name}_low"], row.judged[f"{name}_high"]
    return f"{mark}{row.judged[name]:.4f}{mark} [{low:.4f}, {high:.4f}]"
