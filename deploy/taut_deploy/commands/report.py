"""``taut report``."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.options import JsonFlag
from taut_deploy.commands.output import print_json, printable, say

_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY")


def report(
    directory: Annotated[
        Path,
        typer.Argument(
            help="What taut validate or taut bench rollout left, or a gateway's rollout.directory."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File to draw the page into.")
    ] = None,
    show: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open", help="Open it in a browser; by default where there is a screen."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Find or draw the page of a validation or a rollout, and open it."""
    from taut_deploy.pages.folder import page_of

    page = page_of(directory, output)
    if as_json:
        print_json({"kind": page.kind, "page": str(page.path.resolve()), "log": page.checked})
    else:
        if page.checked:
            say(page.checked)
        typer.echo(printable(str(page.path.resolve())))
    if _screen() and not as_json if show is None else show:
        typer.launch(page.path.resolve().as_uri())


def _screen() -> bool:
    return sys.stdout.isatty() and (
        sys.platform == "darwin" or any(os.environ.get(name) for name in _SCREENS)
    )
