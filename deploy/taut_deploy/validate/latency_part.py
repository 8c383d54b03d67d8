"""The latency part of a validation: may it run, run it, judge it.

Only servers have a latency: a directory is computed by transformers, whose speed says nothing about
vLLM's. Where a policy requires a measurement that cannot be made, the verdict is INCONCLUSIVE
rather than an error: the accuracy part can still fail the candidate, and nothing passes unmeasured.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.gate import judge_latency, unmeasured_latency
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.latency.measure import Endpoint, Measurement, measure
from taut_deploy.validate.latency.ratios import error_rate, level_ratios
from taut_deploy.validate.latency.section import (
    count_failed,
    measured_section,
    unmeasured_section,
)
from taut_deploy.validate.outcome import Metric, RuleOutcome
from taut_deploy.validate.policy import LatencyBounds, Policy
from taut_deploy.validate.server_connection import is_url
from taut_deploy.validate.server_source import ServerSource
from taut_deploy.validate.text import TokenizedText


def check_lengths(job: ValidationJob, servers: Sequence[ServerSource | None]) -> None:
    """Refuse prompts and answers that a server has no room for.

    Raises:
        CouldNotValidateError: prompt and output exceed ``max_model_len``.
    """
    if _why_not(job) is not None:
        return
    plan = job.latency_plan
    for server in servers:
        # A prompt may have max_positions tokens and one more generated: prompt + output in all.
        positions = None if server is None else server.max_positions
        if positions is not None and plan.prompt_tokens + plan.output_tokens > positions + 1:
            assert server is not None  # noqa: S101 - narrows the type
            raise CouldNotValidateError(
                f"--latency-prompt-tokens, --latency-output-tokens: {plan.prompt_tokens} + "
                f"{plan.output_tokens} are more than the {positions + 1} positions of the "
                f"{server.role}; lower them or give --no-latency"
            )


def compare_latency(
    job: ValidationJob,
    policy: Policy,
    text: TokenizedText,
    baseline: ServerSource | None,
    candidate: ServerSource | None,
) -> tuple[dict[str, Any], tuple[RuleOutcome, ...]]:
    """Measure both servers, if both are, and judge.

    Args:
        job: what to do.
        policy: its ``latency`` section, if any, is judged.
        text: where prompts come from.
        baseline: the server, or None for a directory.
        candidate: likewise.

    Returns:
        The report's section and the outcomes of the bounds.

    Raises:
        CouldNotValidateError: a server refuses the request, or the baseline answers nothing.
    """
    bounds, why_not = policy.latency, _why_not(job)
    if why_not is not None or baseline is None or candidate is None:
        why = why_not or ""
        required = bounds is not None and bounds.required
        rules = unmeasured_latency(bounds, why) if bounds is not None and required else ()
        return unmeasured_section(why, bounds), rules
    started = time.monotonic()
    measurement = _measure(job, text, baseline, candidate)
    seconds = time.monotonic() - started
    ratios: dict[int, Mapping[str, Metric]] = {
        level.concurrency: level_ratios(level, job.sampling.bootstrap, job.sampling.seed)
        for level in measurement.levels
    }
    section = measured_section(job.latency_plan, measurement, ratios, seconds)
    rules = () if bounds is None else _judge(job, bounds, measurement, ratios)
    return section, rules


def _why_not(job: ValidationJob) -> str | None:
    """Why latency is not measured, or None if it is."""
    for role in ("baseline", "candidate"):
        if not is_url(getattr(job, role)):
            return f"the {role} is a directory, and only servers have a latency"
    return "--no-latency was given" if job.latency is False else None


def _measure(
    job: ValidationJob, text: TokenizedText, baseline: ServerSource, candidate: ServerSource
) -> Measurement:
    first, second = (
        Endpoint(server.role, str(server.path), server.model_name, server.headers)
        for server in (baseline, candidate)
    )

    def on_block(done: int, planned: int) -> None:
        if job.progress is not None:
            job.progress("latency", done, planned)

    return measure(job.latency_plan, (first, second), text, job.sampling.seed, on_block)


def _judge(
    job: ValidationJob,
    bounds: LatencyBounds,
    measurement: Measurement,
    ratios: Mapping[int, Mapping[str, Metric]],
) -> tuple[RuleOutcome, ...]:
    planned = {level: ratios.get(level, {}) for level in job.latency_plan.concurrency}
    busy = {level.concurrency: level.client_busy for level in measurement.levels}
    return judge_latency(bounds, planned, error_rate(*count_failed(measurement, "candidate")), busy)
