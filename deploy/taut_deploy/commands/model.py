"""``taut model fetch | list | inspect | verify``."""

import time
from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.given_model import announce_code
from taut_deploy.commands.options import JsonFlag, TrustRemoteCodeFlag
from taut_deploy.commands.output import megabytes, print_facts, print_json, say
from taut_deploy.home import TautHome
from taut_deploy.models import ModelStore
from taut_deploy.progress import progress_reporter

Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit on the hub; the same as owner/name@REVISION."),
]
app = typer.Typer(help="The model store: fetch, list, verify and look into models.")


def _store() -> ModelStore:
    return ModelStore(TautHome.from_environment().models)


@app.command()
def fetch(
    name: str,
    revision: Revision = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a model of this name from another source.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Put a model on disk: a catalogue name, 'owner/name' on the hub, a directory or a GGUF."""
    reference = name if revision is None else f"{name}@{revision}"
    with progress_reporter(quiet=as_json) as progress:
        store = ModelStore(TautHome.from_environment().models, progress=progress)
        record = store.fetch(reference, force=force)
    if as_json:
        print_json(record.as_json())
    else:
        typer.echo(
            f"{record.path}\n{record.digest}  {megabytes(record.bytes)}  from {record.source}"
        )


@app.command("list")
def list_models(as_json: JsonFlag = False) -> None:
    """Show the models in the store."""
    records = _store().list()
    if as_json:
        print_json([record.as_json() for record in records])
        return
    for record in records:
        typer.echo(
            f"{record.name:32} {megabytes(record.bytes):>12}  {record.digest[:19]}  {record.source}"
        )
    if not records:
        typer.echo("the store is empty; try: taut model fetch smollm2-135m-instruct")


@app.command()
def inspect(
    name: str, trust_remote_code: TrustRemoteCodeFlag = False, as_json: JsonFlag = False
) -> None:
    """Show sizes, digest and, for a taut checkpoint, how it was compressed."""
    from taut_deploy.checkpoint import is_checkpoint, read_manifest
    from taut_deploy.models.directory import read_shape

    record = _store().find(name)
    announce_code(Path(record.path), trust_remote_code)
    shape = read_shape(Path(record.path), trust_remote_code=trust_remote_code)
    details: dict[str, object] = {**record.as_json(), "shape": shape.as_json()}
    if is_checkpoint(Path(record.path)):
        manifest = read_manifest(Path(record.path))
        details["checkpoint"] = {
            "scheme": manifest.scheme,
            "bits": manifest.bits,
            "recipe": manifest.recipe.get("name"),
            "recipe_hash": manifest.recipe_hash,
            "base_model": manifest.base_model,
            "layers": len(manifest.layers),
            "validation": manifest.validation,
        }
    if as_json:
        print_json(details)
        return
    print_facts(details)


@app.command()
def verify(
    directory: Path,
    full: Annotated[
        bool, typer.Option("--full", help="Read every file, changed or not since it was hashed.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check a checkpoint's or a fetched model's files; later starts read only what changed."""
    from taut_deploy.worker.checks import verified_by, verify_model

    started = time.monotonic()
    manifest = verify_model(directory, "full" if full else "recorded", say)
    against = verified_by(directory)
    if as_json:
        print_json(
            {
                "path": str(directory.resolve()),
                "verified_against": against,
                "digest": None if manifest is None else manifest.digest,
            }
        )
        return
    if against is None:
        typer.echo(f"{directory}: a whole model; nothing says what its files should be")
        return
    typer.echo(f"{directory}: as {against} says ({time.monotonic() - started:.1f} s)")
