"""``taut bench``."""

import os
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.api_key import read_api_key
from taut_deploy.commands.bench_compressors import compressors
from taut_deploy.commands.bench_distil import distil
from taut_deploy.commands.bench_rollout import rollout
from taut_deploy.commands.options import JsonFlag, ResultsFolder
from taut_deploy.commands.output import line_reporter, make_folder, print_json, print_results, say
from taut_deploy.errors import MeasureError, WorkerError

_KERNEL_GROUPS = (
    "w4a16",
    "scaled-mm",
    "fused",
    "fused-backward",
    "loss",
    "attention",
    "primitives",
)

app = typer.Typer(help="Measure, with the comparison in the same run.", no_args_is_help=True)
app.command()(distil)
app.command()(compressors)
app.command()(rollout)


@app.callback()
def bench() -> None:
    """Measure, with the comparison in the same run."""


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def kernels(
    context: typer.Context,
    report: Annotated[
        Path | None, typer.Option(dir_okay=False, help="HTML file to make of the CSVs.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Report on the CSVs of this folder; measure nothing."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Kernels against the published ones, in one process; needs a CUDA device.

    The first argument names the group, w4a16 where it is left out: w4a16 (Marlin, Machete, vLLM's
    Triton kernel, gemlite, cuBLAS), scaled-mm (8-bit products: CUTLASS, vLLM's Triton kernel,
    cuBLAS), fused (norm, activation, RoPE: vLLM,
    Liger, torch.compile), fused-backward (softmax and the same with gradients: Liger), loss (Liger,
    Cut Cross-Entropy, torch), attention (FlashAttention 3, vLLM's Triton kernels) or primitives
    (GEMM, transpose, convolution, pooling, reduction: cuBLAS, cuDNN, torch). The rest are the
    arguments of 'python -m taut_bench.<group>' (--output DIR …). --report FILE.html makes
    one HTML file with plots of the run's CSVs; with --from DIR of those of an earlier run, which
    needs no device. A group's own options: 'taut bench kernels GROUP --help'.
    """
    from importlib import import_module

    if source is not None:
        if report is None:
            raise MeasureError("--from: give the file to write with --report FILE.html")
        _write_report(source, report, as_json)
        return
    arguments = list(context.args)
    if arguments == ["--help"]:  # behind a group it is the benchmark's own
        typer.echo(context.get_help())
        return
    folder = _output_of(arguments) if report is not None else None
    if as_json and report is None:
        arguments.append("--json")  # the benchmark's to know or to refuse
    named = bool(arguments) and not arguments[0].startswith("-")
    group = arguments.pop(0) if named else "w4a16"
    if group not in _KERNEL_GROUPS:
        known = ", ".join(_KERNEL_GROUPS)
        raise typer.BadParameter(f"unknown group {group!r}: expected one of {known}")
    module = import_module(f"taut_bench.{group.replace('-', '_')}")
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        code = module.main(arguments)
    if report is not None and folder is not None and code in (0, 1):
        _write_report(folder, report, as_json)
    raise typer.Exit(code)


def _output_of(arguments: list[str]) -> Path:
    """Return the folder that the benchmark will write its CSVs to."""
    for i, argument in enumerate(arguments):
        if argument == "--output" and i + 1 < len(arguments):
            return Path(arguments[i + 1])
        if argument.startswith("--output="):
            return Path(argument.partition("=")[2])
    raise MeasureError("--report: give the folder of the CSVs with --output DIR, or --from DIR")


def _write_report(folder: Path, target: Path, as_json: bool) -> None:
    from taut_bench import html_report

    try:
        sections = html_report.write(folder, target)
    except html_report.ReportError as error:
        raise MeasureError(str(error)) from error
    if as_json:
        facts = [
            {"csv": one.name, "plots": len(one.plots), "no_plot": one.no_plot} for one in sections
        ]
        print_json({"report": str(target), "sections": facts})
        return
    for one in sections:
        if one.no_plot:
            say(f"{one.name}.csv: no plot: {one.no_plot}")
    say(f"wrote {target}")


@app.command()
def serve(
    target: Annotated[
        list[str], typer.Option(help="LABEL=URL=MODEL; give it once per server to compare.")
    ],
    concurrency: Annotated[list[int], typer.Option(min=1, help="Requests at once.")] = [1, 16],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per server.")] = 5,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 64,
    output: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for CSV, Markdown and a plot.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Tokens per second of running servers, and the CPU time of a token of those on this machine.

    For example a worker with and without the gateway, or beside llama.cpp's server: whatever
    answers /v1/completions as OpenAI does.
    """
    from taut_deploy.bench import serve_report
    from taut_deploy.bench.serve import Load, Target, measure

    targets: list[Target] = []
    for entry in target:
        parts = entry.split("=")
        if len(parts) != 3:
            raise WorkerError(f"--target {entry}: expected LABEL=URL=MODEL")
        if any(parts[0] == other.label for other in targets):
            raise WorkerError(f"--target {entry}: another one has this label")
        targets.append(Target(parts[0], parts[1].rstrip("/"), parts[2]))
    if output is not None:
        make_folder(output)
    key = read_api_key(None, os.environ, WorkerError)
    found = [
        row for count in concurrency for row in measure(targets, Load(count, rounds, tokens), key)
    ]
    facts = serve_report.describe_host()
    files = serve_report.write(found, facts, output) if output is not None else []
    rows = [asdict(row) for row in found]
    print_results(rows, serve_report.markdown(found, facts), files, as_json=as_json)


@app.command()
def gateway(
    rivals: Annotated[
        str | None,
        typer.Option(
            help="vllm-router, vllm-router-round-robin, smg, litellm, envoy with commas, or none; "
            "default: all of them."
        ),
    ] = None,
    cases: Annotated[
        str | None, typer.Option(help="Cases with commas, or all, the default.")
    ] = None,
    guard: Annotated[
        bool, typer.Option("--guard", help="Compare taut with its live guard on and off instead.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Starts of each system.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.2, help="Length of each load.")] = 3.0,
    output: ResultsFolder = Path("bench-gateway"),
    cache: Annotated[
        Path | None, typer.Option(help="Folder of the rivals; default: beside the output.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """The gateway against its rivals: CPU per request, latency, disconnects, memory.

    With --guard: one gateway, 5 % of its answers compared by the live guard and none, in turn and
    in both orders.
    """
    output = output.resolve()
    if guard:
        for name, value in (("--rivals", rivals), ("--cases", cases), ("--cache", cache)):
            if value is not None:
                raise MeasureError(f"{name}: --guard compares taut with itself; leave it out")
        _bench_guard(rounds, seconds, output, as_json=as_json)
        return
    from taut_deploy.bench.gateway import Plan, choose, measure
    from taut_deploy.bench.gateway_report import document, markdown, write
    from taut_deploy.bench.gateway_systems import RIVALS

    systems, chosen, absent = choose(
        ",".join(RIVALS) if rivals is None else rivals, "all" if cases is None else cases
    )
    make_folder(output)
    place = cache.resolve() if cache else output.parent / f"{output.name}-rivals"
    plan = Plan(systems, chosen, rounds, seconds, output, place)
    found = measure(plan, absent, line_reporter(quiet=as_json))
    print_results(document(found), markdown(found), write(found, output), as_json=as_json)


def _bench_guard(rounds: int, seconds: float, output: Path, *, as_json: bool) -> None:
    from taut_deploy.bench.gateway_guard import compare
    from taut_deploy.bench.gateway_guard_report import document, markdown, write

    make_folder(output)
    found = compare(rounds, seconds, line_reporter(quiet=as_json))
    print_results(document(found), markdown(found), write(found, output), as_json=as_json)
