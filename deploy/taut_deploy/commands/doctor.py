"""``taut doctor``: versions, devices, and which kernel each layer of a checkpoint would use."""

from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.options import JsonFlag
from taut_deploy.commands.output import print_facts, print_json


def doctor(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="Also explain the layers of this checkpoint or Hugging Face directory."
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(envvar="TAUT_COMPILE_CACHE", help="As of the worker: where verdicts are."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say what is installed, if the plugin is live, and which kernel each layer would use."""
    from taut_deploy.diagnose.facts import diagnose
    from taut_deploy.tune import follow_verdicts

    if checkpoint is not None:
        follow_verdicts(checkpoint, 1, cache)
    facts = diagnose(checkpoint)
    if as_json:
        print_json(facts)
        return
    layers = facts.pop("layers", None)
    print_facts(facts)
    if layers is not None:
        typer.echo("layers:")
        for row in layers:
            typer.echo(f"  {row['kernel']:32} {row['layers']:4} x {row['shape']}  {row['reason']}")
