"""``taut bench compressors``."""

from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.bench_samples import Making, Samples, make_folders, open_place, tell
from taut_deploy.commands.device import require_device
from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.options import JsonFlag, ModelArgument, ResultsFolder
from taut_deploy.commands.output import line_reporter


@with_groups
def compressors(
    *,
    model: ModelArgument,
    text: Annotated[Path, typer.Option(dir_okay=False, help="UTF-8 text to judge on.")],
    rival: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=PYTHON: llm-compressor, gptqmodel or auto-round, and the interpreter of an "
            "environment that has it; repeat for each."
        ),
    ] = None,
    formats: Annotated[
        str, typer.Option(help="g32-asym, g64-sym, g128-sym, channel-sym with commas, or all.")
    ] = "all",
    only: Annotated[
        str | None,
        typer.Option(help="Methods with commas, as rows name them; else all of taut and rivals."),
    ] = None,
    samples: Samples,
    making: Making,
    output: ResultsFolder = Path("bench-compressors"),
    as_json: JsonFlag = False,
) -> None:
    """INT4 weights by taut, and by rivals in environments of their own.

    All get the same calibration tokens and are judged by the same code: perplexity ratio and KL to
    the base on --text. Rows that are in the output are not measured again.
    """
    require_device(making.device)
    from taut_deploy.bench.compressors import (
        Plan,
        choose_grids,
        choose_methods,
        measure,
        parse_rivals,
    )
    from taut_deploy.bench.compressors_report import RESULTS, markdown
    from taut_deploy.bench.serve_report import describe_run

    rivals = parse_rivals(rival or [])
    methods = choose_methods(only, rivals)
    work = make_folders(output, making.work, "work")
    place = open_place(model, samples, making.device)
    told = line_reporter(quiet=as_json)
    grids = choose_grids(formats, Path(place.base.path), told)
    plan = Plan(place, text, samples.sequences, grids, rivals, methods, work, output.absolute())
    rows = measure(plan, told)
    tell(RESULTS.write_table(output, markdown(rows, describe_run())), rows, as_json=as_json)
