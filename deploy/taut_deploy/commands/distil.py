"""``taut distil``."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from taut_deploy.commands.device import parse_devices, require_device
from taut_deploy.commands.given_model import fetch_model
from taut_deploy.commands.options import (
    DeviceOption,
    JsonFlag,
    ResumeFlag,
    TextOption,
    TrustRemoteCodeFlag,
)
from taut_deploy.commands.output import made_checkpoint, megabytes, print_json, say
from taut_deploy.errors import OutputError, RecipeError
from taut_deploy.files import checked_output
from taut_deploy.home import TautHome
from taut_deploy.progress import progress_reporter
from taut_deploy.strict_yaml import parse_mapping, validate_mapping

if TYPE_CHECKING:
    from taut_deploy.checkpoint import Manifest
    from taut_deploy.compress.train.settings import TrainSettings


def distil(
    student: Annotated[str, typer.Argument(help="Compressed checkpoint, pruned or shrunk model.")],
    output: Annotated[Path, typer.Option(help="Checkpoint directory to make.")],
    teacher: Annotated[
        str | None, typer.Option(help="The model that the student was made from.")
    ] = None,
    text: TextOption = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to train on, repetitions counted.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE of a setting (deploy/README.md); repeat."),
    ] = None,
    resume: ResumeFlag = True,
    device: DeviceOption = "cpu",
    devices: Annotated[
        str | None, typer.Option(help="Devices that hold a part each, such as cuda:0,cuda:1.")
    ] = None,
    trust_remote_code: TrustRemoteCodeFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a compressed student by its teacher (distillation), or by text alone (QAT)."""
    require_device(device)
    shared = () if devices is None else parse_devices(devices)
    if shared and device != "cpu":
        raise OutputError("--devices: the devices that it names share the work; leave --device out")
    chosen = _settings(settings or [], tokens)
    target = checked_output(output)
    home = TautHome.from_environment()
    fetch = partial(fetch_model, home, trust_remote_code=trust_remote_code)
    # Seconds of imports, which no mistake above waits for.
    from taut_deploy.compress.train.distil import DistilJob
    from taut_deploy.compress.train.distil import distil as run

    job = DistilJob(
        fetch(student),
        None if teacher is None else fetch(teacher),
        target,
        tuple(text or ["corpus"]),
        chosen,
        home.root,
        shared[0] if shared else device,
        resume,
        trust_remote_code,
        shared,
    )
    if chosen.optimizer == "adamw" and not as_json:
        say("moments in fp32 (torch); --set optimizer=adamw8bit keeps them in 8 bits")
    with progress_reporter(quiet=as_json) as report:
        manifest = run(job, report)
    _print(job.output, manifest, as_json)


def _settings(given: list[str], tokens: int | None) -> "TrainSettings":
    """Parse ``NAME=VALUE`` entries.

    Raises:
        RecipeError: an entry is none, or a name or value is wrong.
    """
    from taut_deploy.compress.train.settings import TrainSettings

    found: dict[str, object] = {}
    for entry in given:
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise RecipeError(f"--set {entry[:80]!r}: write NAME=VALUE, as in learning_rate=1e-4")
        found |= parse_mapping(f"{name}: {value}", "--set", RecipeError, "NAME=VALUE")
    # YAML reads 1e-4 as text.
    found = {name: _number(value) for name, value in found.items()}
    if tokens is not None:
        found["tokens"] = tokens
    return validate_mapping(TrainSettings, found, "--set", RecipeError)


def _number(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _print(output: Path, manifest: "Manifest", as_json: bool) -> None:
    held_out = manifest.recipe.get("held_out", {})
    summary = {
        **made_checkpoint(output, manifest),
        "scheme": manifest.scheme,
        "held_out": held_out,
        "tokens": manifest.recipe.get("trained_tokens"),
    }
    if as_json:
        print_json(summary)
        return
    before, after = (held_out.get(when, {}).get("loss") for when in ("before", "after"))
    judged = (
        "no text was held out" if before is None else f"held-out loss {before:.4f} -> {after:.4f}"
    )
    typer.echo(
        f"{output}: {manifest.scheme}, {megabytes(manifest.bytes)}, {judged}\n{manifest.digest}"
    )
