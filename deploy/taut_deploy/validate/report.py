"""The report: JSON for programs, Markdown and a page for people, JUnit for CI; all or none."""

import contextlib
import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from taut_deploy.errors import OutputError
from taut_deploy.files import (
    disk_errors_named,
    write_json_atomically,
    write_text_atomically,
)
from taut_deploy.validate import metrics
from taut_deploy.validate.divergence import Comparison
from taut_deploy.validate.gate import combine
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.junit import render_junit
from taut_deploy.validate.markdown import render
from taut_deploy.validate.outcome import PARTS, Metric, RuleOutcome
from taut_deploy.validate.output import JSON_NAME, PARTIAL_NAME, REPORT_SCHEMA
from taut_deploy.validate.page.render import render_page
from taut_deploy.validate.policy import Policy
from taut_deploy.validate.text import TokenizedText, Tokenizer
from taut_deploy.validate.textfile import render_textfile

# 2: latency, verdicts of both parts, a rule's part and concurrency. 3: serving. 4: tasks, slices, a
# rule's subject, the histogram of the KL, cumulative latencies.
SCHEMA_VERSION = 4
MARKDOWN_NAME, JUNIT_NAME = "report.md", "junit.xml"
PAGE_NAME, TEXTFILE_NAME = "report.html", "report.prom"
_WORST = 10
_CONTEXT_TOKENS = 24


def discard_earlier(output: Path) -> None:
    """Take an earlier report away: a broken-off run must not leave an old verdict behind."""
    with contextlib.suppress(FileNotFoundError), disk_errors_named(output):
        # The JSON last: it is what marks the directory as ours.
        (output / MARKDOWN_NAME).unlink(missing_ok=True)
        (output / JUNIT_NAME).unlink(missing_ok=True)
        (output / PAGE_NAME).unlink(missing_ok=True)
        (output / TEXTFILE_NAME).unlink(missing_ok=True)
        (output / PARTIAL_NAME).unlink(missing_ok=True)
        (output / JSON_NAME).unlink()


def write(output: Path, content: Mapping[str, Any]) -> tuple[Path, Path, Path, Path]:
    """Write the files, the JSON last.

    Returns:
        Paths of the JSON, the Markdown, the JUnit file and the page.

    Raises:
        OutputError: the directory cannot be made or written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--output {output}: {error.strerror}") from error
    json_file, markdown_file, junit_file, page = (
        output / name for name in (JSON_NAME, MARKDOWN_NAME, JUNIT_NAME, PAGE_NAME)
    )
    write_text_atomically(markdown_file, render(content))
    write_text_atomically(junit_file, render_junit(content))
    write_text_atomically(page, render_page(content))
    write_text_atomically(output / TEXTFILE_NAME, render_textfile(content))
    write_json_atomically(json_file, content)
    return json_file, markdown_file, junit_file, page


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a validation measured, and how each rule judged it.

    Args:
        comparison: both models over the same tokens.
        looks: numbers of sequences at which the limits on accuracy were judged.
        noise_kind: what the noise floor was measured with.
        measured: the metrics with their intervals, by name.
        rules: the outcome of every rule of the policy.
        latency: the latency part as plain data; says why where there is none.
        serving: what the served candidate answered, likewise.
        tasks: what both models answered to the items of tasks, likewise.
        slices: what they answered to the prompts of slices, likewise.
    """

    comparison: Comparison
    looks: Sequence[int]
    noise_kind: str
    measured: Mapping[str, Metric]
    rules: Sequence[RuleOutcome]
    latency: Mapping[str, Any]
    serving: Mapping[str, Any]
    tasks: Mapping[str, Any]
    slices: Mapping[str, Any]


def build(
    *,
    job: ValidationJob,
    policy: Policy,
    found: Findings,
    text: TokenizedText,
    tokenizer: Tokenizer,
    models: Mapping[str, Mapping[str, Any]],
    environment: Mapping[str, Any],
    started_at: datetime.datetime,
    wall_time_s: float,
) -> dict[str, Any]:
    """Assemble the report as plain data, ready for JSON."""
    rules, comparison = found.rules, found.comparison
    verdict = combine(rule.verdict for rule in rules)
    return {
        "schema": REPORT_SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict.value,
        "exit_code": verdict.exit_code,
        "verdicts": _verdicts(rules),
        "policy": {"source": str(job.policy), **policy.model_dump(exclude_none=True)},
        "rules": [dataclasses.asdict(rule) | {"verdict": rule.verdict.value} for rule in rules],
        "metrics": {name: dataclasses.asdict(metric) for name, metric in found.measured.items()},
        "kl": {
            "unit": "nats",
            "is_lower_bound": comparison.kl_is_lower_bound,
            "top_k": job.servers.top_k if comparison.kl_is_lower_bound else None,
            **metrics.kl_tail(comparison),
            "histogram": metrics.kl_histogram(comparison.kl),
        },
        "perplexity": metrics.perplexities(comparison),
        "mean_delta_p": metrics.mean_delta_p(comparison),
        "noise_floor": found.noise_kind,
        "latency": dict(found.latency),
        "serving": dict(found.serving),
        "tasks": dict(found.tasks),
        "slices": dict(found.slices),
        "worst_positions": worst_positions(comparison, text, tokenizer),
        "models": {role: dict(described) for role, described in models.items()},
        "text": _text_section(job, text, comparison),
        "statistics": {
            "interval": "two-sided 95 % over all looks, bootstrap over sequences; studentised for "
            "means, and for the share above a quantile",
            "looks": list(found.looks),
            "resamples": job.sampling.bootstrap,
            "seed": job.sampling.seed,
        },
        "environment": dict(environment),
        "started_at": started_at.isoformat(timespec="seconds"),
        "wall_time_s": round(wall_time_s, 3),
    }


def _verdicts(rules: Sequence[RuleOutcome]) -> dict[str, str | None]:
    """The verdict of each part; None where nothing was judged."""
    parts: dict[str, str | None] = {}
    for part in PARTS:
        found = [rule.verdict for rule in rules if rule.part == part]
        parts[part] = combine(found).value if found else None
    return parts


def _text_section(
    job: ValidationJob, text: TokenizedText, comparison: Comparison
) -> dict[str, Any]:
    return {
        "path": str(job.text),
        "sha256": text.text_sha256,
        "bytes": text.text_bytes,
        "tokens_sha256": text.tokens_sha256,
        "bos_token_id": text.bos_token_id,
        "sequences": len(comparison.kl),
        "sequence_length": job.sampling.sequence_length,
        "predictions": int(comparison.kl.size),
    }


def worst_positions(
    comparison: Comparison, text: TokenizedText, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """The positions of largest KL as text: what came before, what came, what each expected."""
    order = np.argsort(-comparison.kl, axis=None, kind="stable")[:_WORST]
    rows = []
    for sequence, position in zip(*np.unravel_index(order, comparison.kl.shape), strict=True):
        at = (int(sequence), int(position))
        ids = text.sequences[at[0]]
        start = max(0, at[1] + 1 - _CONTEXT_TOKENS)
        rows.append(
            {
                "sequence": at[0],
                "position": at[1] + 1,
                "kl": float(comparison.kl[at]),
                "context": tokenizer.decode(list(ids[start : at[1] + 1])),
                "token": tokenizer.decode([ids[at[1] + 1]]),
                "after": _after(tokenizer, ids[at[1] + 2 :]),
                "baseline_probability": float(np.exp(-comparison.baseline_nll[at])),
                "candidate_probability": float(np.exp(-comparison.candidate_nll[at])),
                "baseline_top1": tokenizer.decode([int(comparison.baseline_top1[at])]),
                "candidate_top1": tokenizer.decode([int(comparison.candidate_top1[at])]),
            }
        )
    return rows


def _after(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids[: _CONTEXT_TOKENS // 2])) if ids else ""
