"""``taut task fetch | list``: tasks for ``taut validate`` out of packages on the index."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.options import JsonFlag
from taut_deploy.commands.output import print_json
from taut_deploy.errors import OutputError
from taut_deploy.home import TautHome
from taut_deploy.validate.tasks.items import read_task
from taut_deploy.validate.tasks.packaged import PACKAGED, packaged_task, require_packaged

app = typer.Typer(help="Tasks for taut validate: fetch them out of packages, list them.")


@app.command()
def fetch(
    name: str,
    output: Annotated[
        Path | None, typer.Option(help="File to copy the items to, to be changed.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Put a task on disk, as a file of items that --task takes."""
    require_packaged(name)
    path = packaged_task(name)
    task = read_task(path, "task")
    if output is not None:
        if output.exists():
            raise OutputError(f"--output {output}: it exists; name a new file")
        path = Path(shutil.copyfile(path, output))
    told = {"name": name, "path": str(path), "items": len(task.items), "sha256": task.sha256}
    if as_json:
        print_json({**told, "kind": task.kind, "licence": PACKAGED[name].licence})
        return
    typer.echo(f"{path}\n{len(task.items)} items, {PACKAGED[name].licence}")


@app.command("list")
def list_tasks(as_json: JsonFlag = False) -> None:
    """Show the tasks that can be fetched, and which are here."""
    folder = TautHome.from_environment().tasks
    rows = [
        {
            "name": name,
            "package": task.package,
            "licence": task.licence,
            "about": task.about,
            "fetched": (folder / f"{name}.jsonl").is_file(),
        }
        for name, task in PACKAGED.items()
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        here = "fetched" if row["fetched"] else ""
        typer.echo(f"{row['name']:12} {here:8} {row['licence']:12} {row['about']}")
