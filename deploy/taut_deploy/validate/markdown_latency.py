"""The latency section of the Markdown report, made from the JSON report alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from taut_deploy.validate.tables import cell, table

LABELS = {
    "ttft_p50_ratio": "TTFT p50",
    "ttft_p95_ratio": "TTFT p95",
    "itl_p50_ratio": "ITL p50",
    "itl_p95_ratio": "ITL p95",
    "e2e_p50_ratio": "end to end p50",
    "e2e_p95_ratio": "end to end p95",
    "throughput_ratio": "throughput",
    "error_rate": "failed requests",
}


def latency(report: Mapping[str, Any]) -> str:
    """Render the section.

    Args:
        report: the content of ``report.json``.
    """
    section = report["latency"]
    lines = ["## Latency", ""]
    if not section["measured"]:
        judged = "" if report["policy"].get("latency") else " The policy sets no bounds on it."
        return "\n".join([*lines, f"Not measured: {section['why_not']}.{judged}"])
    if section["gave_up"]:
        lines += [f"**Broken off**: {cell(section['gave_up'])}.", ""]
    for level in section["levels"]:
        lines += [_level(level), ""]
    rates = (_error_rate(role, rate) for role, rate in section["error_rate"].items())
    plan = section["plan"]
    lines += [
        f"Failed requests: {'; '.join(rates)}.{_failures(section['levels'])}",
        "",
        f"{plan['prompt_tokens']} prompt tokens, {plan['output_tokens']} output tokens, time-out "
        f"{plan['timeout_s']:g} s, {section['wall_time_s']:.0f} s in all. Load: {section['load']}. "
        f"Order: {section['order']}. Intervals: {section['interval']}.",
    ]
    if not report["policy"].get("latency"):
        lines += ["", "The policy sets no bounds on latency: nothing of this was judged."]
    return "\n".join(lines)


def _level(level: Mapping[str, Any]) -> str:
    rows = []
    for name, ratio in level["ratios"].items():
        interval = f"[{ratio['low']:.3f}, {ratio['high']:.3f}]"
        sides = (_side_value(level[role], name) for role in ("baseline", "candidate"))
        rows.append((LABELS[name], *sides, f"{ratio['estimate']:.3f}", interval))
    head = ("", "baseline", "candidate", "ratio", "95 % interval")
    title = (
        f"Concurrency {level['concurrency']}, {level['blocks']} blocks, "
        f"{level['baseline']['requests']} requests each; the client computed "
        f"{level['client_busy']:.0%} of the time."
    )
    return f"{title}\n\n{table(head, rows)}"


def _side_value(side: Mapping[str, Any], ratio: str) -> str:
    if ratio == "throughput_ratio":
        return f"{side['output_tokens_per_s']:.1f} tokens/s"
    kind, quantile, _ = ratio.split("_")
    return f"{side[f'{kind}_ms'][quantile]:.2f} ms"


def _error_rate(role: str, rate: Mapping[str, Any]) -> str:
    return (
        f"{role} {rate['failed']} of {rate['sent']}, {rate['estimate']:.2%} "
        f"[{rate['low']:.2%}, {rate['high']:.2%}]"
    )


def _failures(levels: Sequence[Mapping[str, Any]]) -> str:
    """The failures there were, most frequent first."""
    found = [
        f"{role} at concurrency {level['concurrency']}: {count} × {cell(failure)}"
        for role in ("baseline", "candidate")
        for level in levels
        for failure, count in level[role]["failures"].items()
    ]
    return f" {'; '.join(found)}." if found else ""
