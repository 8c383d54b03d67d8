"""The loss of a run as a table and a picture."""

import csv
import io
import math
from pathlib import Path
from typing import Any

from taut_deploy.compress.train.loop import COLUMNS
from taut_deploy.files import write_bytes_atomically, write_text_atomically

CSV, PNG = "training_loss.csv", "training_loss.png"


def write_curve(directory: Path, rows: list[list[float]]) -> None:
    """Write the table and the picture.

    Args:
        directory: to write into.
        rows: one a step, :data:`.loop.COLUMNS`; parts without a weight are NaN and left empty.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([["" if math.isnan(x) else f"{x:.9g}" for x in row] for row in rows])
    write_text_atomically(directory / CSV, text.getvalue())
    write_bytes_atomically(directory / PNG, _picture(rows))


def _picture(rows: list[list[float]]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    tokens = [row[1] for row in rows]
    for index in range(2, 6):
        values = [row[index] for row in rows]
        if not all(math.isnan(value) for value in values):
            axes.plot(tokens, values, linewidth=1, label=COLUMNS[index])
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss, per token")
    axes.set_yscale("log" if all(row[2] > 0 for row in rows) else "linear")
    axes.legend(frameon=False)
    content = io.BytesIO()
    # Without the library's name and version, equal runs give equal bytes.
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(content, metadata={"Software": None})
    return content.getvalue()
