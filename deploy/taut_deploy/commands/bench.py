"""``taut bench``."""

import os
import platform
import time
from dataclasses import asdict
from typing import Annotated

import typer

from taut_deploy.commands.output import JsonFlag, print_json
from taut_deploy.errors import WorkerError

app = typer.Typer(help="Measure, with the comparison in the same run.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure, with the comparison in the same run."""


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def kernels(context: typer.Context) -> None:
    """W4A16 kernels against Marlin, Machete, gemlite and cuBLAS; needs a CUDA device.

    Arguments are those of 'python -m taut_kernels.bench.w4a16' (--output DIR [--shape] [--tokens]).
    """
    from taut_kernels.bench.w4a16 import main

    raise typer.Exit(main(context.args))


@app.command()
def serve(
    target: Annotated[
        list[str], typer.Option(help="LABEL=URL=MODEL; give it once per server to compare.")
    ],
    concurrency: Annotated[list[int], typer.Option(min=1, help="Requests at once.")] = [1, 16],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per server.")] = 5,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 64,
    as_json: JsonFlag = False,
) -> None:
    """Tokens per second of running servers, e.g. a worker with and without the gateway."""
    from taut_deploy.bench.serve import Load, Target, measure

    targets = []
    for entry in target:
        parts = entry.split("=")
        if len(parts) != 3:
            raise WorkerError(f"--target {entry}: expected LABEL=URL=MODEL")
        targets.append(Target(parts[0], parts[1].rstrip("/"), parts[2]))
    key = os.environ.get("TAUT_API_KEY")
    found = [
        row for count in concurrency for row in measure(targets, Load(count, rounds, tokens), key)
    ]
    if as_json:
        print_json([asdict(row) for row in found])
        return
    host = f"{os.cpu_count()} x {platform.machine()}"
    typer.echo(f"{host}, {time.strftime('%Y-%m-%d')}, {tokens} tokens an answer, {rounds} rounds\n")
    typer.echo("| server | at once | tokens/s, median (range) |\n|---|---|---|")
    for row in found:
        spread = f"{row.lowest:.1f} to {row.highest:.1f}"
        typer.echo(f"| {row.label} | {row.concurrency} | {row.median:.1f} ({spread}) |")
