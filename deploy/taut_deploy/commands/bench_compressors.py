"""``taut bench compressors``."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.bench_distil import Samples
from taut_deploy.commands.device import require_device
from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.output import DeviceOption, JsonFlag, make_folder, print_json, say
from taut_deploy.home import TautHome
from taut_deploy.models import ModelStore


@with_groups
def compressors(
    *,
    model: Annotated[str, typer.Argument(help="Model name, hub id, directory or .gguf file.")],
    text: Annotated[Path, typer.Option(dir_okay=False, help="UTF-8 text to judge on.")],
    rival: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=PYTHON: llm-compressor, gptqmodel or auto-round, and the interpreter of an "
            "environment that has it; repeat for each."
        ),
    ] = None,
    formats: Annotated[
        str, typer.Option(help="g32-asym, g64-sym, g128-sym with commas, or all that fit.")
    ] = "all",
    samples: Samples,
    work: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder of the checkpoints.")
    ] = None,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder of the results.")] = Path(
        "bench-compressors"
    ),
    device: DeviceOption = "cpu",
    as_json: JsonFlag = False,
) -> None:
    """INT4 weights by taut, and by rivals in environments of their own.

    All get the same calibration tokens and are judged by the same code: perplexity ratio and KL to
    the base on --text. Rows that are in the output are not measured again.
    """
    from taut_deploy.bench.compressors import Plan, choose_grids, measure, parse_rivals
    from taut_deploy.bench.compressors_report import write_table
    from taut_deploy.bench.distil_students import Place
    from taut_deploy.bench.serve_report import describe_host

    require_device(device)
    rivals = parse_rivals(rival or [])
    work = (output / "work") if work is None else work
    for folder in (output, work):
        make_folder(folder)
    home = TautHome.from_environment()
    record = ModelStore(home.models).fetch(model)
    told = (lambda _: None) if as_json else say
    grids = choose_grids(formats, Path(record.path), told)
    calibrated = (samples.calibration, samples.calibration_sequences, samples.sequence_length)
    place = Place(record, *calibrated, home.root, device)
    plan = Plan(place, text, samples.sequences, grids, rivals, work, output.absolute())
    rows = measure(plan, told)
    facts = {"command": f"taut {' '.join(sys.argv[1:])}", **describe_host()}
    table = write_table(output, rows, facts)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    typer.echo(table.read_text(encoding="utf-8"))
