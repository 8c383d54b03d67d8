"""What a search found: ``frontier.json`` for programs, ``frontier.md`` for people, and a plot."""

import io
from collections.abc import Mapping
from typing import Any

from taut_deploy.bench.rows import measured_with
from taut_deploy.files import write_bytes_atomically, write_json_atomically, write_text_atomically
from taut_deploy.frontier.judging import Miss
from taut_deploy.frontier.ledger import Try
from taut_deploy.frontier.request import ShrinkRequest
from taut_deploy.frontier.walk import Frontier

SCHEMA, SCHEMA_VERSION = "taut-frontier", 1
JSON_NAME, MARKDOWN_NAME, PLOT_NAME = "frontier.json", "frontier.md", "frontier.svg"
_COLOURS = {"PASS": "tab:green", "FAIL": "tab:red", "INCONCLUSIVE": "tab:orange"}
_KL, _RATIO = "mean_kl", "perplexity_ratio"


def write(request: ShrinkRequest, frontier: Frontier, facts: Mapping[str, str]) -> dict[str, Any]:
    """Write the three files; returns what the JSON holds.

    Args:
        request: what was asked for.
        frontier: what was found.
        facts: command, machine, versions and date.

    Raises:
        OutputError: the disk is full or refuses.
    """
    content = as_json(request, frontier, facts)
    output = request.output
    write_bytes_atomically(output / PLOT_NAME, _plot(request, frontier))
    write_text_atomically(output / MARKDOWN_NAME, markdown(request, frontier, facts))
    write_json_atomically(output / JSON_NAME, content)
    return content


def as_json(request: ShrinkRequest, frontier: Frontier, facts: Mapping[str, str]) -> dict[str, Any]:
    """The search as plain data."""
    miss = frontier.nearest_miss
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "model": {"name": request.model.name, "digest": request.model.digest},
        "policy": request.policy.model_dump(mode="json", exclude_none=True),
        "limit": None if request.limit is None else request.limit.flag,
        "status": frontier.status,
        "checkpoint": None if frontier.checkpoint is None else str(frontier.checkpoint),
        "tries": [entry.model_dump() for entry in frontier.tries],
        "not_reached": [
            {"name": one.name, "predicted_bytes": one.weights_bytes} for one in frontier.untried
        ],
        "skipped": [{"name": one.name, "reason": one.reason} for one in frontier.skipped],
        "nearest_miss": None
        if miss is None
        else {"name": miss.entry.name, "rule": dict(miss.rule), "told": told_miss(miss)},
        "facts": dict(facts),
    }


def told_miss(miss: Miss) -> str:
    """A miss in one line: the try, the bound, and why it is not kept."""
    rule, entry = miss.rule, miss.entry
    of_subject = f"{rule['subject']}: " if rule.get("subject") else ""
    return (
        f"{entry.name} ({(entry.bytes or 0) / 1e6:.1f} MB), which missed {of_subject}"
        f"{rule['metric']} {rule['side']} {rule['limit']:g}: {rule['reason']}"
    )


def markdown(request: ShrinkRequest, frontier: Frontier, facts: Mapping[str, str]) -> str:
    """The search for people."""
    limit = "" if request.limit is None else f", {request.limit.flag}"
    lines = [
        f"# The smallest {request.model.name} that passes {request.policy.name}",
        "",
        f"{_answer(request, frontier)}{limit}.",
        "",
        "| recipe | weights | mean KL, nats [95 %] | perplexity ratio [95 %] | verdict | time |",
        "|---|---|---|---|---|---|",
        *map(_row, frontier.tries),
        "",
        f"![KL by size]({PLOT_NAME})",
        "",
    ]
    lines += [f"- {one.name}: not tried: {one.reason}" for one in frontier.skipped]
    lines += [
        f"- {one.name}: not reached, {one.weights_bytes / 1e6:.1f} MB predicted"
        for one in frontier.untried
    ]
    return "\n".join([*lines, "", measured_with(facts), ""])


def _answer(request: ShrinkRequest, frontier: Frontier) -> str:
    if frontier.status == "found":
        last = frontier.tries[-1]
        return f"{last.name}, {(last.bytes or 0) / 1e6:.1f} MB of weights: {frontier.checkpoint}"
    if frontier.status == "budget":
        return "None yet: the time was used up; run the command again to go on"
    miss = frontier.nearest_miss
    return "None passes" if miss is None else f"None passes; the nearest miss is {told_miss(miss)}"


def _row(entry: Try) -> str:
    if entry.outcome == "REFUSED":
        size = entry.bytes if entry.bytes is not None else entry.predicted_bytes
        return f"| {entry.name} | {size / 1e6:.1f} MB | - | - | refused: {entry.reason} | - |"
    seconds = entry.compress_seconds + entry.validate_seconds
    again = ", judged anew" if entry.rejudged else ""
    return (
        f"| {entry.name} | {(entry.bytes or 0) / 1e6:.1f} MB | {_interval(entry, _KL)} | "
        f"{_interval(entry, _RATIO)} | {entry.outcome}{again} | {seconds:.0f} s |"
    )


def _interval(entry: Try, name: str) -> str:
    metric = entry.metrics[name]
    return f"{metric['estimate']:.4f} [{metric['low']:.4f}, {metric['high']:.4f}]"


def _plot(request: ShrinkRequest, frontier: Frontier) -> bytes:
    """KL over size with intervals, the policy's bound beside it, as SVG."""
    # Imported here: it takes half a second, and no other part draws.
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    content = io.BytesIO()
    # Text as text, and equal figures as equal bytes.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": SCHEMA}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        judged = [entry for entry in frontier.tries if entry.metrics]
        for outcome, colour in _COLOURS.items():
            rows = [entry for entry in judged if entry.outcome == outcome]
            if rows:
                kl = [entry.metrics[_KL] for entry in rows]
                axes.errorbar(
                    [(entry.bytes or 0) / 1e6 for entry in rows],
                    [one["estimate"] for one in kl],
                    yerr=[
                        [max(0.0, one["estimate"] - one["low"]) for one in kl],
                        [max(0.0, one["high"] - one["estimate"]) for one in kl],
                    ],
                    fmt="o",
                    capsize=3,
                    color=colour,
                    label=outcome,
                )
        for index, entry in enumerate(judged):
            place = ((entry.bytes or 0) / 1e6, entry.metrics[_KL]["estimate"])
            # A name is text, also where it holds a dollar sign.
            axes.annotate(
                entry.name,
                place,
                xytext=(5, -11 if index % 2 else 5),
                textcoords="offset points",
                fontsize=8,
                parse_math=False,
            )
        bound = request.policy.require.limits.get(_KL)
        if bound is not None and bound.max is not None:
            label = f"{request.policy.name}: at most {bound.max:g}"
            axes.axhline(bound.max, linestyle="--", color="grey", linewidth=1, label=label)
        if judged and all(entry.metrics[_KL]["low"] > 0 for entry in judged):
            axes.set_yscale("log")
        axes.margins(x=0.1)
        axes.set_xlabel("weights, MB")
        axes.set_ylabel("mean KL to the model, nats")
        if judged:
            axes.legend(frameon=False)
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(content, metadata={"Date": None})
    return content.getvalue()
