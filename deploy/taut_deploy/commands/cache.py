"""``taut cache``."""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.options import JsonFlag
from taut_deploy.commands.output import megabytes, print_json, say
from taut_deploy.commands.worker_options import (
    CompileCache,
    ContextOptions,
    KernelOptions,
    KvCacheGib,
    worker_spec,
)

app = typer.Typer(help="Compiled artefacts of workers: their key, and a worker's start in advance.")

Checkpoint = Annotated[
    Path, typer.Argument(help="As given to 'taut worker': its path is part of the key.")
]
VllmArguments = Annotated[
    list[str] | None, typer.Argument(help="After '--': the worker's vLLM arguments.")
]


@app.command()
@with_groups
def key(
    *,
    checkpoint: Checkpoint,
    vllm_args: VllmArguments = None,
    context: ContextOptions,
    kernels: KernelOptions,
    cache: CompileCache = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the key of what a worker would compile here; --json says what it is made of."""
    from taut_deploy.cache.warm import key_for

    found = key_for(
        replace(worker_spec(checkpoint, vllm_args or (), context, kernels), cache=cache)
    )
    if as_json:
        print_json({"key": str(found), "parts": asdict(found)})
    else:
        typer.echo(str(found))


@app.command()
@with_groups
def warm(
    *,
    checkpoint: Checkpoint,
    cache: Annotated[
        Path,
        typer.Option(envvar="TAUT_COMPILE_CACHE", help="Directory that workers get as --cache."),
    ],
    vllm_args: VllmArguments = None,
    context: ContextOptions,
    kv_cache_gib: KvCacheGib = 1,
    kernels: KernelOptions,
    timeout: Annotated[
        float, typer.Option(min=1, help="Longest wait for the first correct token, seconds.")
    ] = 1800,
    measure: Annotated[
        bool, typer.Option("--measure", help="Start it a second time and say how long that took.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Start a worker until it gives one correct token, so that later ones find its compiled code.

    Does nothing where that was done before. Interrupted, it leaves no marker.
    """
    from taut_deploy.cache.warm import warm as fill

    spec = worker_spec(checkpoint, vllm_args or (), context, kernels, kv_cache_gib)
    with _terminated_as_interrupted():
        made = fill(spec, cache, timeout, measure, say)
    if as_json:
        print_json(asdict(made) | {"directory": str(made.directory)})
        return
    typer.echo(f"{made.directory}  {megabytes(made.bytes)}")
    typer.echo("it was warm already" if made.already else "warm")
    for name, seconds in (("cold", made.cold_s), ("warm", made.warm_s)):
        if seconds is not None:
            typer.echo(f"{name} start to the first correct token: {seconds:.1f} s")


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, with which Jobs are ended, stops the worker too instead of leaving it behind."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
