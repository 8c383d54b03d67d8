"""The latency part of the report, as plain data."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from taut_deploy.validate.latency.measure import ROLES, Block, Level, Measurement
from taut_deploy.validate.latency.plan import LatencyPlan
from taut_deploy.validate.latency.ratios import SAMPLES, error_rate
from taut_deploy.validate.outcome import Metric
from taut_deploy.validate.policy import LatencyBounds

_QUANTILES = {"p50": 0.5, "p95": 0.95}
_KINDS_OF_FAILURE = 5
_LOAD = (
    "closed loop, streamed completions, temperature 0, fixed output length; prompts begin with "
    "random tokens and carry a cache salt of their own, so that no prefix cache helps"
)
_ORDER = (
    "blocks of the two models alternate; of each two pairs one begins with the baseline, which "
    "one is drawn; one warm-up block per model and concurrency is left out"
)
_INTERVAL = (
    "two-sided 95 %, pairs of blocks left out or resampled: jackknife for medians (smoothed) and "
    "throughput, the wider of two bootstraps for 95th percentiles"
)


def unmeasured_section(why: str, bounds: LatencyBounds | None) -> dict[str, Any]:
    """The section of a report without latency.

    Args:
        why: it was not measured.
        bounds: the policy's, or None; those that are not required are listed as not judged.
    """
    limits = [] if bounds is None or bounds.required else bounds.limits
    return {
        "measured": False,
        "why_not": why,
        "not_judged": [
            {"part": "latency", "metric": name, "side": side, "limit": limit, "concurrency": None}
            for name, side, limit in limits
        ],
    }


def measured_section(
    plan: LatencyPlan,
    measurement: Measurement,
    ratios: Mapping[int, Mapping[str, Metric]],
    seconds: float,
) -> dict[str, Any]:
    """Describe a measurement.

    Args:
        plan: what was asked.
        measurement: what came.
        ratios: concurrency → metrics by name.
        seconds: how long it took.

    Returns:
        ``plan``, ``load``, ``order``, ``interval`` and ``wall_time_s`` say how it was done,
        ``gave_up`` why it was broken off, or None. ``levels`` has one entry per concurrency:
        ``ratios`` (candidate ÷ baseline by name, with both intervals), ``client_busy``, and for
        ``baseline`` and ``candidate`` requests, failed ones by kind, tokens, tokens per second, and
        p50 and p95 of ``ttft_ms``, ``itl_ms`` and ``e2e_ms`` (None without an answer), and
        ``cumulative_ms``, the quantiles of each in steps of 2 %.
        ``error_rate`` has both roles over all concurrencies.
    """
    return {
        "measured": True,
        "why_not": None,
        "not_judged": [],
        "gave_up": measurement.gave_up,
        "plan": dataclasses.asdict(plan),
        "load": _LOAD,
        "order": _ORDER,
        "interval": _INTERVAL,
        "wall_time_s": round(seconds, 3),
        "levels": [_level(level, ratios[level.concurrency]) for level in measurement.levels],
        "error_rate": {
            role: {"failed": failed, "sent": sent, **dataclasses.asdict(error_rate(failed, sent))}
            for role in ROLES
            for failed, sent in [count_failed(measurement, role)]
        },
    }


def count_failed(measurement: Measurement, role: str) -> tuple[int, int]:
    """Failed and sent requests of one role at all concurrencies together."""
    blocks = [block for level in measurement.levels for block in level.blocks(role)]
    sent = sum(len(block.answers) for block in blocks)
    return sent - sum(len(block.whole) for block in blocks), sent


def _level(level: Level, ratios: Mapping[str, Metric]) -> dict[str, Any]:
    return {
        "concurrency": level.concurrency,
        "blocks": len(level.pairs),
        "client_busy": round(level.client_busy, 4),
        "ratios": {name: dataclasses.asdict(metric) for name, metric in ratios.items()},
        **{role: _side(level.blocks(role)) for role in ROLES},
    }


def _side(blocks: list[Block]) -> dict[str, Any]:
    answers = [answer for block in blocks for answer in block.answers]
    tokens = sum(answer.tokens for answer in answers)
    failures = Counter(answer.failure for answer in answers if answer.failure is not None)
    summary: dict[str, Any] = {
        "requests": len(answers),
        "failed": failures.total(),
        "failures": dict(failures.most_common(_KINDS_OF_FAILURE)),
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / sum(block.wall_s for block in blocks),
    }
    for kind, samples in SAMPLES.items():
        seconds = [value for block in blocks for value in samples(block)]
        summary[f"{kind}_ms"] = {
            name: 1e3 * float(np.quantile(seconds, probability)) if seconds else None
            for name, probability in _QUANTILES.items()
        }
    summary["cumulative_ms"] = {
        kind: _cumulative([value for block in blocks for value in samples(block)])
        for kind, samples in SAMPLES.items()
    }
    return summary


def _cumulative(seconds: list[float]) -> list[float]:
    """Milliseconds below which 0, 2, … 100 % of the values lie; empty without a value."""
    if not seconds:
        return []
    return [1e3 * float(value) for value in np.quantile(seconds, np.linspace(0.0, 1.0, 51))]
