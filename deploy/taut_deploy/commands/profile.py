"""``taut profile``."""

from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.options import JsonFlag, ResultsFolder
from taut_deploy.commands.output import make_folder
from taut_deploy.commands.subject import Choice, finish, instrument, one_subject


@with_groups
def profile(
    choice: Choice,
    wait: Annotated[int, typer.Option(min=0, help="Steps before the profiler.")] = 2,
    warmup: Annotated[int, typer.Option(min=0, help="Steps under it that are dropped.")] = 2,
    active: Annotated[int, typer.Option(min=1, help="Steps that are recorded.")] = 5,
    rows: Annotated[int, typer.Option(min=1, help="Kernels to list.")] = 15,
    output: ResultsFolder = Path("taut-profile"),
    as_json: JsonFlag = False,
) -> None:
    """Where the time goes: a chrome trace, the longest kernels, and findings in words."""
    with instrument(as_json):
        from taut_bench.instruments import profile

        trace = output / "trace.json.gz"
        schedule = profile.Schedule(wait, warmup, active)
        looked_at = one_subject(choice)
        make_folder(output)
        found = profile.record(looked_at, trace, schedule)
        text = profile.text(found, rows)
    finish(output, "profile", text, found.as_json(), as_json, [trace])
