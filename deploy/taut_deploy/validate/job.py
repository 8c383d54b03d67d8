"""What a validation is asked to do and what it answers: plain data, no tensor library."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.latency.plan import LatencyPlan

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total): ``compare``, ``noise`` and ``serve`` count sequences,
``sampling`` prompts,
``task NAME`` and ``slice NAME`` items, ``latency`` pairs of blocks."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationJob:
    """One comparison of a candidate with its baseline.

    Args:
        baseline: Hugging Face directory, or base URL of an OpenAI-compatible server
            (``http://host:port``, with or without ``/v1``).
        candidate: likewise; the two kinds may be mixed.
        text: UTF-8 file the models are scored on; never the calibration text.
        policy: built-in policy name or YAML file.
        output: directory for ``report.json``, ``.md``, ``.html``, ``.prom`` and ``junit.xml``.
        sequences: number of token sequences, the blocks of the bootstrap.
        sequence_length: tokens per sequence, of which ``sequence_length - 1`` are predicted.
        seed: seed of the bootstrap and of the latency load; nothing else is random.
        device: torch device for directories, e.g. ``cpu`` or ``cuda``.
        bootstrap: bootstrap resamples.
        noise_sequences: sequences of the A/A run (baseline against itself); 0 leaves it out.
        top_k: log-probabilities per position asked of a server; stock vLLM allows at most 20.
        baseline_model: model name on the baseline server; by default the server's only model.
        candidate_model: likewise for the candidate.
        api_key: bearer token for servers; never written to the report.
        timeout_s: seconds to wait for one server answer of the accuracy part.
        baseline_headers: sent with every request to the baseline server, as (name, value).
        candidate_headers: likewise for the candidate.
        latency: whether to measure it, which takes two servers; None measures where it can be.
        latency_plan: how much of it.
        accept_lower_bound: let a KL that is only known as a lower bound (servers) pass a ``max``
            rule.
        served: also have a worker of a candidate directory score a few sequences, so that what
            serves is compared with what was scored.
        trust_remote_code: let Python code in the directories run.
        tasks: files of items that both models answer, beside those of the policy.
        harness: names of tasks of lm-evaluation-harness.
        harness_path: directory with the user's own task definitions for it.
        slices: ``NAME`` or ``NAME=FILE`` of slices to measure beside those of the policy.
        max_items: at most as many of each task; None leaves it to the policy.
        max_sequences: more sequences are drawn, up to so many, while a limit on accuracy is
            undecided; None draws ``sequences`` and no more.
        resume: go on with the answers of a run that broke off: None where all that they depend on
            is the same, True refuses anything else, False begins anew.
        progress: called after each sequence and each pair of latency blocks.

    Raises:
        CouldNotValidateError: a number is out of range; the flag is named.
    """

    baseline: str
    candidate: str
    text: Path
    policy: str | Path
    output: Path
    sequences: int = 32
    sequence_length: int = 512
    seed: int = 0
    device: str = "cpu"
    bootstrap: int = 2000
    noise_sequences: int = 8
    top_k: int = 20
    baseline_model: str | None = None
    candidate_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 300.0
    baseline_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    candidate_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    latency: bool | None = None
    latency_plan: LatencyPlan = field(default_factory=LatencyPlan)
    accept_lower_bound: bool = False
    served: bool = False
    trust_remote_code: bool = False
    tasks: tuple[Path, ...] = ()
    harness: tuple[str, ...] = ()
    harness_path: Path | None = None
    slices: tuple[str, ...] = ()
    max_items: int | None = None
    max_sequences: int | None = None
    resume: bool | None = None
    progress: Progress | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        floors = {
            "sequences": 2,
            "sequence_length": 2,
            "seed": 0,
            "bootstrap": 200,
            "noise_sequences": 0,
            "top_k": 1,
            "max_items": 2,
            "max_sequences": self.sequences,
        }
        for name, least in floors.items():
            value = getattr(self, name)
            if value is not None and value < least:
                flag = "--" + name.replace("_", "-")
                raise CouldNotValidateError(f"{flag}: {value} is below {least}")
        if not self.timeout_s > 0:
            raise CouldNotValidateError(
                f"--timeout-s: {self.timeout_s} is not a positive number of seconds"
            )


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
