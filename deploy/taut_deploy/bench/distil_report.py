"""Rows of ``taut bench distil``: one JSON line each, and a Markdown table of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taut_deploy.bench.rows import Results, measured_with

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


RESULTS = Results("distil", Row, lambda row: (row.student, row.text))


def markdown(rows: Sequence[Row], facts: Mapping[str, str]) -> str:
    """The table for people, under what it was measured with."""
    lines = [
        measured_with(facts),
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
