"""``taut bench``."""

import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.output import JsonFlag, print_json, say
from taut_deploy.errors import OutputError, WorkerError

_KERNEL_GROUPS = ("w4a16", "scaled-mm", "fused")

app = typer.Typer(help="Measure, with the comparison in the same run.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure, with the comparison in the same run."""


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def kernels(context: typer.Context) -> None:
    """Kernels against the published ones, in one process; needs a CUDA device.

    The first argument names the group, w4a16 where it is left out: w4a16 (Marlin, Machete, gemlite,
    cuBLAS), scaled-mm (8-bit products: CUTLASS, cuBLAS) or fused (norm, activation, RoPE: vLLM,
    Liger, torch.compile). The rest are the arguments of 'python -m taut_kernels.bench.<group>'
    (--output DIR …).
    """
    from importlib import import_module

    arguments = list(context.args)
    named = bool(arguments) and not arguments[0].startswith("-")
    group = arguments.pop(0) if named else "w4a16"
    if group not in _KERNEL_GROUPS:
        known = ", ".join(_KERNEL_GROUPS)
        raise typer.BadParameter(f"unknown group {group!r}: expected one of {known}")
    module = import_module(f"taut_kernels.bench.{group.replace('-', '_')}")
    raise typer.Exit(module.main(arguments))


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


@app.command()
def gateway(
    rivals: Annotated[
        str, typer.Option(help="vllm-router, litellm, envoy with commas, or none.")
    ] = "vllm-router,litellm,envoy",
    cases: Annotated[str, typer.Option(help="Cases with commas, or all.")] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Starts of each system.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.2, help="Length of each load.")] = 3.0,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder of the results.")] = Path(
        "bench-gateway"
    ),
    cache: Annotated[
        Path | None, typer.Option(help="Folder of the rivals; default: beside the output.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """The gateway against its rivals: CPU per request, latency, disconnects, memory."""
    from taut_deploy.bench.gateway import Plan, choose, measure
    from taut_deploy.bench.gateway_report import document, markdown, write

    systems, chosen, absent = choose(rivals, cases)
    output = output.resolve()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise OutputError(f"--output {output}: {problem.strerror}") from None
    place = cache.resolve() if cache else output.parent / f"{output.name}-rivals"
    plan = Plan(systems, chosen, rounds, seconds, output, place)
    found = measure(plan, absent, (lambda _: None) if as_json else say)
    files = write(found, output)
    if as_json:
        print_json(document(found))
        return
    typer.echo(markdown(found))
    for file in files:
        say(f"wrote {file}")
