"""``taut ps | logs | stop``: what ``taut serve`` started here."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.options import JsonFlag
from taut_deploy.commands.output import print_json, printable, say
from taut_deploy.errors import WorkerError
from taut_deploy.home import TautHome

_Port = Annotated[
    int | None, typer.Argument(help="Port of the gateway; not needed where only one runs.")
]
_FOLLOW_S = 0.2


def ps(as_json: JsonFlag = False) -> None:
    """List every 'taut serve' of this TAUT_HOME that runs, and whether it is ready."""
    from taut_deploy.serve.running import running
    from taut_deploy.serve.supervise import is_ready

    found = [
        (directory, record, is_ready(f"{record.url}/health/ready"))
        for directory, record in running(TautHome.from_environment().run)
    ]
    if as_json:
        print_json(
            [
                {**asdict(record), "url": record.url, "ready": ready, "logs": str(directory)}
                for directory, record, ready in found
            ]
        )
        return
    for _, record, ready in found:
        state = "ready" if ready else "not ready"
        models = printable(", ".join(record.models))
        typer.echo(f"{record.pid:>8}  {record.url}  {state}  {models}")
    if not found:
        typer.echo("nothing runs; try: taut serve --detach")


def logs(
    port: _Port = None,
    name: Annotated[
        str | None, typer.Option(help="gateway or a worker; default: what taut serve says.")
    ] = None,
    lines: Annotated[int, typer.Option(min=1, help="How many of the last lines.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Print the last lines of a log of a running 'taut serve'."""
    from taut_deploy.serve.running import OUTPUT, choose

    directory, record = choose(TautHome.from_environment().run, port)
    if name is None and record.detached:
        file = directory / OUTPUT
    elif name is None or name not in record.children:
        known = ", ".join(record.children)
        raise WorkerError(f"--name {name or ''}: give one of {known}")
    else:
        file = directory / f"{name}.log"
    _print_tail(file, lines, follow)


def stop(
    port: _Port = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for live streams.")] = 90.0,
) -> None:
    """End a 'taut serve' as Ctrl-C would: streams finish, then its workers end."""
    from taut_deploy.serve.running import choose, end

    _, record = choose(TautHome.from_environment().run, port)
    end(record, timeout)
    say(f"stopped {record.url}")


def _print_tail(file: Path, lines: int, follow: bool) -> None:
    try:
        with file.open(encoding="utf-8", errors="replace") as log:
            for line in log.readlines()[-lines:]:
                typer.echo(printable(line.rstrip("\n")))
            while follow:
                if line := log.readline():
                    typer.echo(printable(line.rstrip("\n")))
                else:
                    time.sleep(_FOLLOW_S)
    except FileNotFoundError as error:
        raise WorkerError(f"{file}: nothing was written there yet") from error
