"""``taut compress``."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from taut_deploy.commands.device import require_device
from taut_deploy.commands.output import (
    DeviceOption,
    JsonFlag,
    TrustRemoteCodeFlag,
    announce_code,
    megabytes,
    print_json,
)
from taut_deploy.errors import OutputError
from taut_deploy.files import checked_output
from taut_deploy.home import TautHome
from taut_deploy.models import ModelStore
from taut_deploy.progress import progress_reporter
from taut_deploy.recipe import load_recipe

if TYPE_CHECKING:
    from taut_deploy.compress.plan import CompressionPlan


def compress(
    model: Annotated[str, typer.Argument(help="Model name, hub id, directory or .gguf file.")],
    recipe: Annotated[str, typer.Option(help="Built-in recipe or YAML file.")] = "w8a8",
    output: Annotated[Path | None, typer.Option(help="Checkpoint directory to make.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would be done, and stop.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue an interrupted run.")
    ] = True,
    device: DeviceOption = "cpu",
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Take a model that is quantised already.")
    ] = False,
    trust_remote_code: TrustRemoteCodeFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Compress a model into a checkpoint that vLLM, transformers and 'taut worker' load."""
    from taut_deploy.compress import pipeline
    from taut_deploy.compress.job import CompressionJob
    from taut_deploy.compress.pipeline_plan import plan as make_plan

    require_device(device)
    chosen = load_recipe(recipe)
    home = TautHome.from_environment()
    if output is None and not plan:
        raise OutputError("--output: give the checkpoint directory to make")
    target = home.checkpoints / "plan" if output is None else checked_output(output)
    record = ModelStore(home.models).fetch(model)
    announce_code(Path(record.path), trust_remote_code)
    job = CompressionJob(
        record, chosen, target, home.root, device, resume, trust_remote_code, requantize
    )
    if plan:
        _print_plan(make_plan(job), as_json)
        return
    with progress_reporter(quiet=as_json) as report:
        manifest = pipeline.compress(job, report)
    summary = {
        "path": str(job.output.resolve()),
        "digest": manifest.digest,
        "bytes": manifest.bytes,
        "base_bytes": record.bytes,
        "scheme": manifest.scheme,
        "recipe_hash": manifest.recipe_hash,
        "layers": len(manifest.layers),
    }
    if as_json:
        print_json(summary)
        return
    ratio = manifest.bytes / record.bytes
    typer.echo(
        f"{job.output}: {manifest.scheme}, {len(manifest.layers)} layers, "
        f"{megabytes(record.bytes)} -> {megabytes(manifest.bytes)} ({ratio:.2f}x)\n"
        f"{manifest.digest}"
    )


def _print_plan(plan: "CompressionPlan", as_json: bool) -> None:
    if as_json:
        print_json(plan.as_json())
        return
    kept = [layer for layer in plan.layers if layer.scheme is None and not layer.treated]
    zeros = Counter(layer.fate for layer in plan.layers if layer.scheme is None and layer.treated)
    of_groups = plan.group_size is not None
    group = f"groups of {plan.group_size}, " if of_groups else ""
    if plan.scheme not in {"mixed", "dense"} and not of_groups:
        group = "per channel, "
    typer.echo(
        f"recipe {plan.recipe}: {plan.scheme}, {group}{plan.blocks} blocks, "
        f"{len(plan.layers)} linear layers"
    )
    typer.echo(f"weights {megabytes(plan.bytes_before)} -> {megabytes(plan.bytes_after)}")
    typer.echo(
        f"about {megabytes(plan.peak_memory_bytes)} of memory and {megabytes(plan.disk_bytes)} "
        "of disk at most"
    )
    for line in plan.whole_model:
        typer.echo(line)
    for fate, count in zeros.items():
        typer.echo(f"dense, its zeros written out: {count} layers by {fate}")
    for layer in kept:
        typer.echo(f"kept: {layer.name} {layer.shape}: {layer.fate}")
    for name in plan.stacked_experts:
        typer.echo(f"kept: {name}: its experts are one tensor in files and servers")
