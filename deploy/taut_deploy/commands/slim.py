"""``taut slim``."""

from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.device import require_device
from taut_deploy.commands.given_model import fetch_model
from taut_deploy.commands.options import (
    DeviceOption,
    JsonFlag,
    ModelArgument,
    TextOption,
    TrustRemoteCodeFlag,
)
from taut_deploy.commands.output import made_checkpoint, megabytes, print_json
from taut_deploy.files import checked_output
from taut_deploy.home import TautHome
from taut_deploy.progress import progress_reporter


def slim(
    model: ModelArgument,
    output: Annotated[Path, typer.Option(help="Model directory to make.")],
    ffn: Annotated[float | None, typer.Option(help="Share of the neurons to keep.")] = None,
    heads: Annotated[
        float | None, typer.Option(help="Share of the heads to keep, by key-value group.")
    ] = None,
    hidden: Annotated[float | None, typer.Option(help="Share of the channels to keep.")] = None,
    depth: Annotated[float | None, typer.Option(help="Share of the blocks to keep.")] = None,
    experts: Annotated[
        float | None, typer.Option(help="Share of every mixture's experts to keep.")
    ] = None,
    text: TextOption = None,
    sequences: Annotated[
        int, typer.Option(min=1, help="Sequences of 512 tokens to measure importance on.")
    ] = 32,
    device: DeviceOption = "cpu",
    trust_remote_code: TrustRemoteCodeFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a model narrower or shallower: what matters least on a text is cut out."""
    require_device(device)
    target = checked_output(output)
    home = TautHome.from_environment()
    record = fetch_model(home, model, trust_remote_code=trust_remote_code)
    # Seconds of imports, which no mistake above waits for.
    from taut_deploy.compress.shrink.shrink import ShrinkJob, shrink

    asked = {"depth": depth, "heads": heads, "ffn": ffn, "experts": experts, "hidden": hidden}
    shares = {axis: share for axis, share in asked.items() if share is not None}
    job = ShrinkJob(
        record,
        target,
        shares,
        tuple(text or ["corpus"]),
        home.root,
        sequences,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    with progress_reporter(quiet=as_json) as report:
        manifest = shrink(job, report)
    losses = manifest.recipe["held_out_cross_entropy"]
    summary = {
        **made_checkpoint(target, manifest),
        "base_bytes": record.bytes,
        "held_out_cross_entropy": losses,
    }
    if as_json:
        print_json(summary)
        return
    steps = ", ".join(f"{axis} {loss:.3f}" for axis, loss in losses.items())
    typer.echo(
        f"{target}: {megabytes(record.bytes)} -> {megabytes(manifest.bytes)}; cross entropy on "
        f"held-out text: {steps}\n{manifest.digest}"
    )
