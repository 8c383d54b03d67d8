"""``taut compress``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from taut_deploy.commands.device import parse_devices, require_device, require_machine
from taut_deploy.commands.given_model import fetch_model
from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.options import (
    DeviceOption,
    JsonFlag,
    ModelArgument,
    RequantizeFlag,
    ResumeFlag,
    TrustRemoteCodeFlag,
)
from taut_deploy.commands.output import made_checkpoint, megabytes, print_json
from taut_deploy.errors import ModelError, OutputError, RecipeError
from taut_deploy.files import checked_output
from taut_deploy.home import TautHome
from taut_deploy.progress import progress_reporter
from taut_deploy.recipe import Order, Recipe, load_recipe, with_target

if TYPE_CHECKING:
    from taut_deploy.checkpoint import Manifest
    from taut_deploy.compress.plan import CompressionPlan


@dataclass(frozen=True)
class TargetOptions:
    """What a mixture of schemes is to reach.

    Args:
        target_bits: Of recipe mixed: bits a weight, scales included.
        target_bytes: Of recipe mixed: size of all weights, such as 5GiB.
        max_kl: Of recipe mixed: predicted divergence, in nats.
    """

    target_bits: float | None = None
    target_bytes: str | None = None
    max_kl: float | None = None


@dataclass(frozen=True)
class SharingOptions:
    """Where a compression computes, and what shares its work.

    Args:
        devices: Cards that share the work on a block and the training, such as cuda:0,cuda:1.
        workers: Processes that share the blocks of a recipe that needs no calibration.
    """

    device: DeviceOption = "cpu"
    devices: str | None = None
    workers: Annotated[int, typer.Option(min=0)] = 0


@with_groups
def compress(
    model: ModelArgument,
    target: TargetOptions,
    sharing: SharingOptions,
    recipe: Annotated[str, typer.Option(help="Built-in recipe or YAML file.")] = "w8a8",
    output: Annotated[Path | None, typer.Option(help="Checkpoint directory to make.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would be done, and stop.")] = False,
    resume: ResumeFlag = True,
    served_by: Annotated[
        str, typer.Option(help="Whose kernels --plan names: here, cpu, h100 or h200.")
    ] = "here",
    requantize: RequantizeFlag = False,
    trust_remote_code: TrustRemoteCodeFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Compress a model into a checkpoint that vLLM, transformers and 'taut worker' load."""
    require_machine(served_by)
    chosen = with_target(
        load_recipe(recipe), target.target_bits, target.target_bytes, target.max_kl
    )
    device, devices = _shared(chosen, sharing)
    home = TautHome.from_environment()
    if output is None and not plan:
        raise OutputError("--output: give the checkpoint directory to make")
    place = home.checkpoints / "plan" if output is None else checked_output(output)
    record = fetch_model(home, model, trust_remote_code=trust_remote_code)
    # Seconds of imports, which no mistake above waits for.
    from taut_deploy.compress import pipeline
    from taut_deploy.compress.job import CompressionJob, found_at_output
    from taut_deploy.compress.pipeline_plan import plan as make_plan

    job = CompressionJob(
        record,
        chosen,
        place,
        home.root,
        device,
        resume,
        trust_remote_code,
        requantize,
        sharing.workers,
        devices,
    )
    with _recipe_named(recipe):
        if plan:
            if output is not None:
                found_at_output(job)  # refuses what a run would
            _print_plan(make_plan(job, served_by), as_json)
            return
        with progress_reporter(quiet=as_json) as report:
            manifest = pipeline.compress(job, report)
    _print_summary(job.output, record.bytes, manifest, as_json)


@contextmanager
def _recipe_named(reference: str) -> Iterator[None]:
    """Let an error that begins with a recipe's key begin with the recipe."""
    try:
        yield
    except (ModelError, RecipeError) as error:
        key = str(error).partition(":")[0].partition(".")[0]
        if key not in Recipe.model_fields:
            raise
        raise type(error)(f"{reference}: {error}") from error


def _shared(recipe: Recipe, options: SharingOptions) -> tuple[str, tuple[str, ...]]:
    """The device, and all that share the calibration where there are several.

    Raises:
        OutputError: a device is not there, or the options contradict each other.
        RecipeError: the recipe has nothing to share.
    """
    require_device(options.device)
    if not options.workers and options.devices is None:
        return options.device, ()
    flag = "--workers" if options.workers else "--devices"
    if options.workers and options.devices is not None:
        raise OutputError("--workers: processes share the CPU; leave --devices out")
    if options.device != "cpu":
        shared = "the CPU" if options.workers else "the devices that it names"
        raise OutputError(f"{flag}: {shared} share the work; leave --device out")
    blocks = recipe.of_blocks()
    if options.devices is None:
        if blocks is None:
            raise RecipeError(f"{flag}: recipe {recipe.name!r} does nothing block by block")
        from taut_deploy.compress.by_weights import require_by_weights

        require_by_weights(blocks, {})
        return options.device, ()
    if blocks is None and not recipe.of_orders(Order.AFTER):
        raise RecipeError(
            f"{flag}: recipe {recipe.name!r} neither does anything block by block nor trains"
        )
    devices = parse_devices(options.devices)
    return devices[0], devices


def _print_summary(output: Path, base_bytes: int, manifest: "Manifest", as_json: bool) -> None:
    summary = {
        **made_checkpoint(output, manifest),
        "base_bytes": base_bytes,
        "scheme": manifest.scheme,
        "recipe_hash": manifest.recipe_hash,
        "layers": len(manifest.layers),
    }
    if as_json:
        print_json(summary)
        return
    ratio = manifest.bytes / base_bytes
    typer.echo(
        f"{output}: {manifest.scheme}, {len(manifest.layers)} layers, "
        f"{megabytes(base_bytes)} -> {megabytes(manifest.bytes)} ({ratio:.2f}x)\n"
        f"{manifest.digest}"
    )


def _print_plan(plan: "CompressionPlan", as_json: bool) -> None:
    if as_json:
        print_json(plan.as_json())
        return
    of_groups = plan.group_size is not None
    group = f"groups of {plan.group_size}, " if of_groups else ""
    if plan.scheme not in {"mixed", "dense"} and not of_groups:
        group = "per channel, "
    typer.echo(
        f"recipe {plan.recipe}: {plan.scheme}, {group}{plan.blocks} blocks, "
        f"{len(plan.layers)} linear layers"
    )
    for line in _layer_lines(plan):
        typer.echo(line)
    if plan.devices:
        typer.echo(f"calibration shared by {', '.join(plan.devices)}")
    for table in plan.tables:
        scales = f"groups of {table.group_size}" if table.group_size else "a scale a row"
        typer.echo(
            f"  {table.name} {list(table.shape)}: {table.bits} bits, {scales}, "
            f"{megabytes(table.bytes_before)} -> {megabytes(table.bytes)}"
        )
    typer.echo(f"weights {megabytes(plan.bytes_before)} -> {megabytes(plan.bytes_after)}")
    card = plan.device_memory_bytes
    device = "" if card is None else f" and {megabytes(card)} of the card's"
    time = "" if plan.seconds is None else f", {plan.seconds:.0f} s for the blocks"
    typer.echo(
        f"about {megabytes(plan.peak_memory_bytes)} of memory{device} and "
        f"{megabytes(plan.disk_bytes)} of disk at most{time}"
    )
    for line in plan.whole_model:
        typer.echo(line)
    for name in plan.stacked_experts:
        typer.echo(f"kept: {name}: its experts are one tensor in files and servers")


def _layer_lines(plan: "CompressionPlan") -> list[str]:
    """One line for layers that differ in their block alone and are treated alike."""
    blocks_of: dict[str, list[str]] = {}
    for layer in plan.layers:
        owner = next(name for name in plan.block_names if layer.name.startswith(f"{name}."))
        group = f" g{layer.group_size}" if layer.group_size else ""
        told = (
            f"{layer.name.removeprefix(owner + '.')} {list(layer.shape)}: {layer.fate}: "
            f"{layer.scheme or 'dense'}{group}, {megabytes(layer.bytes_before)} -> "
            f"{megabytes(layer.bytes)}{f'; {layer.kernel}' if layer.kernel else ''}"
        )
        blocks_of.setdefault(told, []).append(owner.rpartition(".")[2])
    return [
        f"  {told}" + ("" if len(found) == plan.blocks else f"; blocks {', '.join(found)}")
        for told, found in blocks_of.items()
    ]
