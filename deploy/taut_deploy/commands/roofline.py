"""``taut roofline``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.options import JsonFlag, ResultsFolder
from taut_deploy.commands.output import make_folder, say
from taut_deploy.commands.subject import Choice, finish, instrument, subjects
from taut_deploy.home import TautHome

CEILINGS_FILE = "ceilings.json"


@dataclass(frozen=True, kw_only=True)
class Points(Choice):
    """Likewise, with several sizes of an op.

    Args:
        shape: Sizes of an op, NAME=VALUE[,VALUE…]: a point for each; repeat it.
    """

    shape: list[str] | None = None


@with_groups
def roofline(
    choice: Points,
    output: ResultsFolder = Path("taut-roofline"),
    again: Annotated[
        bool, typer.Option("--again", help="Measure the ceilings anew, do not take them kept.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """How near an op, a callable or a model comes to the machine's copy and matrix rates."""
    with instrument(as_json):
        from taut_bench.instruments import ceilings, roofline, roofline_plot

        found = list(subjects(choice))
        make_folder(output)
        limits = ceilings.measured(
            found[0].device,
            [roofline.matrix_dtype(one) for one in found],
            TautHome.from_environment().root / CEILINGS_FILE,
            again=again,
            say=say,
        )
        results = [roofline.analyse(one, limits) for one in found]
        picture = output / "roofline.png"
        roofline_plot.write_png(results, limits, picture)
        text = "\n\n".join(roofline.table(result, limits) for result in results)
        document = {
            "ceilings": limits.as_json(),
            "results": [result.as_json() for result in results],
        }
    finish(output, "roofline", text, document, as_json, [picture])
