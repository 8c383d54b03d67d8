"""The page, made from the JSON report alone."""

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from taut_deploy.validate.markdown import LABELS, rule_label
from taut_deploy.validate.markdown_items import label
from taut_deploy.validate.page import charts

_KINDS = {"ttft": "time to first token", "itl": "time between tokens", "e2e": "whole answer"}
_LEAST_LEVELS = 2
"""A figure at one number of requests in flight is no sweep."""


def render_page(report: Mapping[str, Any]) -> str:
    """Fill the template.

    Args:
        report: the content of ``report.json``.
    """
    environment = Environment(
        loader=PackageLoader("taut_deploy.validate.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        report=report,
        labels=LABELS,
        rule_label=rule_label,
        label=label,
        histogram=charts.kl_histogram(report["kl"]),
        recovery=_recovery(report["tasks"]["tasks"]),
        slices=_slices(report["slices"]),
        sweep=_sweep(report["latency"]),
        latency=_latency(report["latency"]),
        sizes=_sizes(report["models"]),
    )


def _recovery(tasks: Mapping[str, Any]) -> str | None:
    rows = [
        (name, task["metrics"]["recovery"])
        for name, task in tasks.items()
        if "recovery" in task["metrics"]
    ]
    return charts.intervals(rows, 1.0, "recovery, 95 % interval") if rows else None


def _slices(slices: Mapping[str, Any]) -> list[str]:
    """One chart of changes in shares, one of shares that agree, one of ratios, one of the KL."""
    rows = [
        (f"{name}: {label(metric)}", metric, value)
        for name, one in slices.items()
        for metric, value in one["metrics"].items()
    ]
    groups = (
        ("_difference", 0.0, "candidate less baseline, share of prompts"),
        ("_ratio", 1.0, "candidate over baseline"),
        ("same_", 1.0, "share of prompts on which both agree"),
        ("mean_kl", 0.0, "mean KL, nats"),
    )
    drawn = []
    for part, neutral, axis in groups:
        found = [(name, value) for name, metric, value in rows if part in metric]
        if found:
            drawn.append(charts.intervals(found, neutral, axis))
    return drawn


def _latency(latency: Mapping[str, Any]) -> list[tuple[int, list[str]]]:
    if not latency["measured"]:
        return []
    return [
        (
            level["concurrency"],
            [charts.cumulative(level, kind, name) for kind, name in _KINDS.items()],
        )
        for level in latency["levels"]
    ]


def _sweep(latency: Mapping[str, Any]) -> list[str]:
    levels = sorted(latency.get("levels", ()), key=lambda level: level["concurrency"])
    if len(levels) < _LEAST_LEVELS:
        return []
    return [
        charts.sweep(levels, lambda side: side["output_tokens_per_s"], "tokens/s"),
        charts.sweep(levels, lambda side: side["ttft_ms"]["p50"], "first token, p50, ms"),
    ]


def _sizes(models: Mapping[str, Any]) -> str | None:
    found = {role: model["bytes"] for role, model in models.items() if model["kind"] == "directory"}
    return charts.sizes(found) if found else None
