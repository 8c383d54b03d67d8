"""What a validation answers: plain data, no tensor library."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = ("accuracy", "tasks", "slices", "latency")
"""What a verdict is combined of."""


class Verdict(enum.Enum):
    """The answer of a validation. ``INCONCLUSIVE`` never promotes."""

    PASS = "PASS"  # noqa: S105 - a verdict, not a password
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_code(self) -> int:
        """0 for PASS, 1 for FAIL, 2 for INCONCLUSIVE (3, could not run, is an exception)."""
        return {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2}[self.value]


@dataclass(frozen=True, slots=True)
class Metric:
    """A measured number and what is known about it.

    Args:
        estimate: the value over all positions.
        low: lower end of the two-sided 95 % interval.
        high: upper end of the two-sided 95 % interval.
        one_sided_low: one-sided 95 % lower bound (the 5 % end).
        one_sided_high: one-sided 95 % upper bound (the 95 % end).
        noise: the same metric of the baseline against itself, or None if not measured.
        is_lower_bound: the quantity is a lower bound of the metric named, not the metric.
    """

    estimate: float
    low: float
    high: float
    one_sided_low: float
    one_sided_high: float
    noise: float | None = None
    is_lower_bound: bool = False


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """One limit of the policy, judged.

    ``margin`` is how far the deciding end of the interval lies inside (positive) or outside, None
    if the metric was not measured; ``part`` is one of :data:`PARTS`, ``concurrency`` belongs to
    ratios of latency, ``subject`` is the name of a task or slice.
    """

    metric: str
    side: str
    limit: float
    verdict: Verdict
    margin: float | None
    reason: str
    concurrency: int | None = None
    part: str = "accuracy"
    subject: str | None = None


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """The verdict, what it rests on and where the report lies.

    ``metrics`` are those of accuracy; ``rules`` has all limits, accuracy first.
    """

    verdict: Verdict
    metrics: Mapping[str, Metric]
    rules: tuple[RuleOutcome, ...]
    report: Mapping[str, Any]
    report_json: Path
    report_markdown: Path
    report_junit: Path
    report_page: Path

    @property
    def exit_code(self) -> int:
        """The process exit code that goes with the verdict."""
        return self.verdict.exit_code
