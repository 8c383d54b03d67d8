"""The roofline as a picture: log FLOP/s over log FLOPs a byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from taut_bench.instruments.ceilings import Ceilings, dtype_name
from taut_bench.instruments.errors import InstrumentError
from taut_bench.instruments.roofline import Roofline, Row

_OPS_SHOWN = 8


def write_png(results: Sequence[Roofline], ceilings: Ceilings, path: Path) -> None:
    """Draw the roof of each dtype and the points of each result.

    What computes nothing (a copy) has no place on a logarithmic axis and is left to the table.

    Args:
        results: of one device; one result also shows its operations.
        ceilings: of that device.
        path: PNG to write.

    Raises:
        InstrumentError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InstrumentError("the plot needs matplotlib: pip install 'taut[deploy]'") from error

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    rows = _shown(results)
    dtypes = list(dict.fromkeys(result.dtype for result in results))
    ridges = [ridge for dtype in dtypes if (ridge := ceilings.ridge(dtype)) is not None]
    known = [row.intensity for row in rows] + ridges or [1.0]
    low, high = min(known) / 4, max(known) * 4
    for dtype in dtypes:
        xs = [low, *(x for x in (ceilings.ridge(dtype),) if x is not None and low < x < high), high]
        ys = [ceilings.attainable(x, dtype) for x in xs]
        axes.plot(xs, ys, color="black", linewidth=1.5)
        axes.annotate(dtype_name(dtype), (xs[-1], ys[-1]), ha="right", va="bottom", fontsize=8)
    for row in rows:
        achieved = row.flops / row.seconds
        axes.plot([row.intensity], [achieved], "o", label=f"{row.name} ({row.fraction:.0%})")
        roof = row.flops / row.floor_seconds
        axes.plot([row.intensity] * 2, [achieved, roof], ":", color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="FLOP/s")
    axes.set_title(ceilings.device, fontsize=9)
    axes.grid(which="both", alpha=0.2)
    if rows:
        axes.legend(fontsize=7, loc="lower right")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InstrumentError(f"{path}: cannot be written: {error.strerror}") from error


def _shown(results: Sequence[Roofline]) -> list[Row]:
    rows = [result.whole for result in results]
    if len(results) == 1:
        rows += results[0].by_op[:_OPS_SHOWN]
    return [row for row in rows if row.flops and math.isfinite(row.intensity)]
