"""Tasks and slices in the Markdown report, made from the JSON report alone."""

from collections.abc import Mapping
from typing import Any

from taut_deploy.validate.tables import cell, table


def label(metric: str) -> str:
    """A metric of a task or slice in words."""
    return metric.replace("_", " ").replace("mean kl", "mean KL (nats)")


def tasks(report: Mapping[str, Any]) -> str:
    """Render the tasks; nothing where none was run.

    Args:
        report: the content of ``report.json``.
    """
    found = report["tasks"]["tasks"]
    if not found:
        return ""
    rows = [_task(name, task) for name, task in found.items()]
    head = (
        "task",
        "items",
        "baseline",
        "candidate",
        "recovery",
        "difference",
        "good to bad",
        "bad to good",
        "p (mid-p McNemar)",
        "p (Holm)",
    )
    lines = ["## Tasks", "", table(head, rows), ""]
    lines += [_power(name, task) for name, task in found.items() if task["power"]["margin"]]
    macro = report["tasks"]["macro_recovery"]
    shown = "" if macro is None else f"Mean recovery {macro:.2%}. "
    return "\n".join([*lines, f"{shown}Intervals: {report['tasks']['interval']}."])


def slices(report: Mapping[str, Any]) -> str:
    """Render the slices; nothing where none was measured.

    Args:
        report: the content of ``report.json``.
    """
    if not report["slices"]:
        return ""
    rows, missing = [], []
    for name, one in report["slices"].items():
        if not one["measured"]:
            missing.append(f"- {name}: not measured: {cell(one['why_not'])}")
        missing += [
            f"- {name}, {label(metric)}: not measured: {why}"
            for metric, why in one["not_measured"].items()
        ]
        rows += [_metric(name, one["items"], *metric) for metric in one["metrics"].items()]
    head = ("slice", "prompts", "metric", "estimate", "95 % interval")
    return "\n".join(["## Slices", "", table(head, rows), "", *missing]).rstrip()


def _metric(name: str, items: int, metric: str, value: Mapping[str, Any]) -> tuple[str, ...]:
    bound = " ≥" if value["is_lower_bound"] else ""
    interval = f"[{value['low']:.4g}, {value['high']:.4g}]"
    return name, str(items), label(metric) + bound, f"{value['estimate']:.4g}", interval


def _task(name: str, task: Mapping[str, Any]) -> tuple[str, ...]:
    accuracy, counts, metrics = task["accuracy"], task["counts"], task["metrics"]
    by = task["score"]
    groups = "" if task["subtasks"] is None else f" in {task['subtasks']} sub-tasks"
    return (
        cell(name),
        f"{task['items']} of {task['items_available']}{groups}",
        *(f"{accuracy[role][by]:.2%}" for role in ("baseline", "candidate")),
        _interval(metrics.get("recovery")),
        _interval(metrics["difference"], signed=True),
        str(counts["baseline_only"]),
        str(counts["candidate_only"]),
        f"{task['mcnemar_p']:.3g}",
        f"{task['mcnemar_p_holm']:.3g}",
    )


def _interval(metric: Mapping[str, Any] | None, *, signed: bool = False) -> str:
    if metric is None:
        return "–"
    form = "{:+.2%}" if signed else "{:.2%}"
    ends = (form.format(metric[end]) for end in ("estimate", "low", "high"))
    return "{} [{}, {}]".format(*ends)


def _power(name: str, task: Mapping[str, Any]) -> str:
    power = task["power"]
    needed = power["items_for_80"]
    said = "no number of items" if needed is None else f"{needed} items"
    return (
        f"- {cell(name)}: with {power['flips']:.1%} flips, {said} show an equally good candidate "
        f"to be within {power['margin']:.2%} in 80 % of runs; {task['items']} were asked, at the "
        f"looks {', '.join(map(str, task['looks']))}."
    )
