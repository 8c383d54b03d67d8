"""JSON and Markdown of a rehearsed rollout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taut_deploy.bench.rollout import Rehearsal
from taut_deploy.bench.rows import measured_with
from taut_deploy.files import write_json_atomically, write_text_atomically

_MEASURES = ("kl", "disagreement")


def document(found: Rehearsal, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything as plain data.

    Args:
        found: what came of it.
        facts: command, machine, versions, harm.
    """
    return {
        "as_expected": found.as_expected,
        "facts": dict(facts),
        "gateway": found.gateway,
        "seconds": round(found.seconds, 1),
        "rollouts": found.rollouts,
        "traffic": found.traffic,
        "audit": {"lines": found.history["lines"], "head": found.history["head"]},
        "pages": found.pages,
    }


def write(found: Rehearsal, facts: Mapping[str, Any], output: Path) -> list[Path]:
    """Write ``report.json`` and ``report.md``; return them and what else is in the folder.

    Raises:
        OutputError: the disk cannot take them.
    """
    files = [output / "report.json", output / "report.md"]
    write_json_atomically(files[0], document(found, facts))
    write_text_atomically(files[1], markdown(found, facts))
    return [*files, output / "rollout" / "audit.jsonl", *(output / name for name in found.pages)]


def markdown(found: Rehearsal, facts: Mapping[str, Any]) -> str:
    """Return the report for people."""
    lines = [
        measured_with(facts),
        "",
        "| candidate | expected | ended | seconds | highest share | answers compared | tokens "
        "| of clients' answers | excess KL, nats | excess disagreement |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    clip = found.gateway["guard"].get("kl_clip_nats", 0.5)
    for name, told in found.rollouts.items():
        evidence = told["evidence"]
        share = f"{told['answered_by_it']} of {told['answered']}"
        measured = [_measured(evidence, *pair) for pair in zip(_MEASURES, (clip, 1), strict=True)]
        cells = [name, told["expected"], told["phase"], f"{told['seconds']:.1f}"]
        cells += [f"{told['highest_percent']:g} %", str(evidence["answers"])]
        cells += [str(evidence["tokens"]), share, *measured]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for name, told in found.rollouts.items():
        lines += [f"**{name}**", ""]
        lines += [
            f"- {step['seconds']:.1f} s: {step['phase']} at {step['percent']:g} %: {step['why']}"
            for step in told["course"]
        ]
        lines.append("")
    traffic = found.traffic
    answered = sum(traffic["answered"].values())
    lines.append(
        f"{answered} requests answered in {found.seconds:.1f} s, {traffic['streams']} of them "
        f"streams; failures: {traffic['failures'] or 'none'}. Audit log: "
        f"{found.history['lines']} lines, newest hash {found.history['head']}."
    )
    return "\n".join([*lines, ""])


def _measured(evidence: Mapping[str, Any], measure: str, unit: float) -> str:
    told = evidence["measures"].get(measure)
    if told is None:
        return "–"
    low, high, mean = (unit * told[key] for key in ("low", "high", "mean"))
    return f"{mean:.4f} [{low:.4f}, {high:.4f}], at most {unit * told['bound']:g}"
