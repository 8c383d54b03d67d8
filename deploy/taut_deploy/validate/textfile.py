"""The verdict in Prometheus' text format, for the textfile collector of node_exporter.

A validation is over before anything could scrape it; the collector shows the file of the last one
until the next. Made from the JSON report alone.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from taut_deploy.validate.outcome import Verdict

_ENDS = ("estimate", "low", "high")
_HELP = {
    "taut_validation_verdict": "1 for the verdict of the newest validation, 0 for the others.",
    "taut_validation_metric": "What was measured: the estimate and the ends of its interval.",
    "taut_validation_margin": "Distance of an interval's end from its limit; below 0 it is broken.",
    "taut_validation_finished_timestamp_seconds": "When it ended, seconds since 1970.",
}
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def render_textfile(report: Mapping[str, Any]) -> str:
    """Render a report.

    Args:
        report: the content of ``report.json``.
    """
    lines: dict[str, list[str]] = {name: [] for name in _HELP}
    for name, labels, value in _samples(report):
        told = ",".join(f'{key}="{str(text).translate(_ESCAPED)}"' for key, text in labels.items())
        lines[name].append(f"{name}{{{told}}} {value!r}")
    parts = (
        "\n".join((f"# HELP {name} {_HELP[name]}", f"# TYPE {name} gauge", *found))
        for name, found in lines.items()
        if found
    )
    return "\n".join(parts) + "\n"


def _samples(report: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str], float]]:
    model = report["models"]["candidate"]
    common = {"policy": report["policy"]["name"], "candidate": model.get("path") or model["url"]}
    for verdict in Verdict:
        value = float(verdict.value == report["verdict"])
        yield "taut_validation_verdict", {**common, "verdict": verdict.value}, value
    for metric, told in report["metrics"].items():
        for end in _ENDS:
            labels = {**common, "metric": metric, "end": end}
            yield "taut_validation_metric", labels, float(told[end])
    for rule in report["rules"]:
        if rule["margin"] is not None:
            labels = {**common, "metric": rule["metric"], "side": rule["side"]}
            labels["subject"] = rule["subject"] or ""
            labels["concurrency"] = "" if rule["concurrency"] is None else str(rule["concurrency"])
            yield "taut_validation_margin", labels, float(rule["margin"])
    started = datetime.fromisoformat(report["started_at"]).timestamp()
    ended = started + report["wall_time_s"]
    yield "taut_validation_finished_timestamp_seconds", common, float(ended)
