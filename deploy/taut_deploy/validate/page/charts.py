"""Charts of a report as SVG to stand inside a page, in the page's own colours.

matplotlib draws; every colour it is given stands for one of the page's, and is exchanged for a
variable of its style sheet afterwards: light and dark are then the page's business.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _QUIET, _BASELINE, _CANDIDATE = "#010101", "#020202", "#030303", "#040404"
_VARIABLES = {
    _INK: "var(--ink)",
    _QUIET: "var(--quiet)",
    _BASELINE: "var(--baseline)",
    _CANDIDATE: "var(--candidate)",
}
_COLOURS = {"baseline": _BASELINE, "candidate": _CANDIDATE}
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "taut",
    "text.parse_math": False,  # a task's name may hold a dollar sign
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _QUIET,
    "axes.labelcolor": _INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
}
# What matplotlib would say about itself, with addresses.
_NO_METADATA: dict[str, str | None] = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def kl_histogram(kl: Mapping[str, Any]) -> str:
    """How many positions lie how far apart, on a logarithmic axis."""
    edges, counts = kl["histogram"]["edges"], kl["histogram"]["counts"]
    widths = [high - low for low, high in pairwise(edges)]

    def draw(axes: "Axes") -> None:
        axes.bar(edges[:-1], counts, widths, align="edge", color=_CANDIDATE)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_xlabel("KL at a position, nats")
        axes.set_ylabel("positions")

    return _drawn(draw, 2.6)


def intervals(rows: Sequence[tuple[str, Mapping[str, float]]], neutral: float, label: str) -> str:
    """Estimates with their intervals, one below the other, and a line where nothing changed.

    Args:
        rows: what it is, and ``estimate``, ``low`` and ``high``.
        neutral: the value of equal models.
        label: of the axis.
    """

    def draw(axes: "Axes") -> None:
        at = range(len(rows))
        values = [row["estimate"] for _, row in rows]
        left = [row["estimate"] - row["low"] for _, row in rows]
        right = [row["high"] - row["estimate"] for _, row in rows]
        axes.axvline(neutral, color=_QUIET, linewidth=0.8)
        lengths = [value - neutral for value in values]
        axes.barh(at, lengths, 0.5, left=neutral, color=_CANDIDATE, alpha=0.35)
        ends = [[max(end, 0.0) for end in side] for side in (left, right)]
        axes.errorbar(values, at, xerr=ends, fmt="o", color=_CANDIDATE, markersize=4, capsize=3)
        axes.set_yticks(list(at), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.set_xlabel(label)

    return _drawn(draw, 0.9 + 0.28 * len(rows))


def cumulative(level: Mapping[str, Any], kind: str, label: str) -> str:
    """Which share of a latency's values is below which time, for both models."""

    def draw(axes: "Axes") -> None:
        for role, colour in _COLOURS.items():
            times = level[role]["cumulative_ms"][kind]
            if times:
                shares = [100 * at / (len(times) - 1) for at in range(len(times))]
                axes.plot(times, shares, color=colour, label=role)
        axes.set_xlabel(f"{label}, ms")
        axes.set_ylabel("% of them")
        axes.set_ylim(0, 100)
        axes.legend(loc="lower right")

    return _drawn(draw, 2.4)


def sweep(
    levels: Sequence[Mapping[str, Any]], read: Callable[[Any], float | None], label: str
) -> str:
    """What becomes of a figure as more requests are in flight, for both models.

    Args:
        levels: of a measurement.
        read: the figure of one model at a level; None where it had no answer.
        label: of the axis.
    """

    def draw(axes: "Axes") -> None:
        for role, colour in _COLOURS.items():
            found = [(level["concurrency"], read(level[role])) for level in levels]
            points = [(at, value) for at, value in found if value is not None]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=colour, label=role, markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_xticks([level["concurrency"] for level in levels])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests in flight")
        axes.set_ylabel(label)
        axes.legend(loc="best")

    return _drawn(draw, 2.2)


def sizes(bytes_by_role: Mapping[str, int]) -> str:
    """Bytes of both models on disk."""

    def draw(axes: "Axes") -> None:
        names = list(bytes_by_role)
        colours = [_COLOURS[name] for name in names]
        axes.barh(names, [bytes_by_role[name] / 1e6 for name in names], 0.5, color=colours)
        axes.invert_yaxis()
        axes.set_xlabel("MB on disk")

    return _drawn(draw, 1.3)


def shares(points: Sequence[tuple[float, float]], unit: str) -> str:
    """The share of a candidate over time, which stays until the next step.

    Args:
        points: time since the start, and percent from then on.
        unit: of the times.
    """

    def draw(axes: "Axes") -> None:
        axes.step(*zip(*points, strict=True), where="post", color=_CANDIDATE, linewidth=1.6)
        axes.plot(*zip(*points, strict=True), "o", color=_CANDIDATE, markersize=4)
        axes.set_xlabel(f"{unit} since the start")
        axes.set_ylabel("% of the traffic")
        axes.set_ylim(-4, 104)

    return _drawn(draw, 2.2)


def _drawn(draw: Any, height: float) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_SETTINGS):
        figure: Figure = Figure(figsize=(5.4, height), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg
