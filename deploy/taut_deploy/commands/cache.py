"""``taut cache``."""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from taut_deploy.commands.output import JsonFlag, megabytes, print_json, say
from taut_deploy.errors import WorkerError
from taut_deploy.worker import KernelMode, WorkerSpec, asked_for

app = typer.Typer(help="Compiled artefacts of workers: their key, and a worker's start in advance.")

Checkpoint = Annotated[
    Path, typer.Argument(help="As given to 'taut worker': its path is part of the key.")
]
VllmArguments = Annotated[
    list[str] | None, typer.Argument(help="After '--': the worker's vLLM arguments.")
]
MaxModelLen = Annotated[int | None, typer.Option(min=16, help="As of the worker.")]
KvCacheDtype = Annotated[str, typer.Option(help="As of the worker.")]
Kernels = Annotated[str | None, typer.Option(help="As of the worker.")]
FusedOps = Annotated[bool, typer.Option("--fused-ops", help="As of the worker.")]
NoFusedOps = Annotated[bool, typer.Option("--no-fused-ops", help="As of the worker.")]
DecodeAttention = Annotated[bool, typer.Option("--decode-attention", help="As of the worker.")]
NoDecodeAttention = Annotated[bool, typer.Option("--no-decode-attention", help="As of the worker.")]


@app.command()
def key(
    checkpoint: Checkpoint,
    vllm_args: VllmArguments = None,
    max_model_len: MaxModelLen = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    kernels: Kernels = None,
    fused_ops: FusedOps = False,
    no_fused_ops: NoFusedOps = False,
    decode_attention: DecodeAttention = False,
    no_decode_attention: NoDecodeAttention = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the key of what a worker would compile here; --json says what it is made of."""
    from taut_deploy.cache.warm import key_for

    fused = asked_for("fused-ops", given=fused_ops, refused=no_fused_ops)
    attention = asked_for("decode-attention", given=decode_attention, refused=no_decode_attention)
    spec = _spec(checkpoint, vllm_args, max_model_len, kv_cache_dtype, kernels, fused, attention)
    found = key_for(spec)
    if as_json:
        print_json({"key": str(found), "parts": asdict(found)})
    else:
        typer.echo(str(found))


@app.command()
def warm(
    checkpoint: Checkpoint,
    cache: Annotated[
        Path,
        typer.Option(envvar="TAUT_COMPILE_CACHE", help="Directory that workers get as --cache."),
    ],
    vllm_args: VllmArguments = None,
    max_model_len: MaxModelLen = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    kv_cache_gib: Annotated[
        int, typer.Option(min=1, help="CPU only: memory for the KV cache, GiB.")
    ] = 1,
    kernels: Kernels = None,
    fused_ops: FusedOps = False,
    no_fused_ops: NoFusedOps = False,
    decode_attention: DecodeAttention = False,
    no_decode_attention: NoDecodeAttention = False,
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

    fused = asked_for("fused-ops", given=fused_ops, refused=no_fused_ops)
    attention = asked_for("decode-attention", given=decode_attention, refused=no_decode_attention)
    spec = _spec(
        checkpoint,
        vllm_args,
        max_model_len,
        kv_cache_dtype,
        kernels,
        fused,
        attention,
        kv_cache_gib,
    )
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


def _spec(
    checkpoint: Path,
    vllm_args: list[str] | None,
    max_model_len: int | None,
    kv_cache_dtype: str,
    kernels: str | None,
    fused_ops: bool | None,
    decode_attention: bool | None,
    kv_cache_gib: int = 1,
) -> WorkerSpec:
    if kernels not in {None, "require", "prefer", "off"}:
        raise WorkerError(f"--kernels {kernels}: use require, prefer or off")
    return WorkerSpec(
        checkpoint=checkpoint,
        max_model_len=max_model_len,
        kv_cache_dtype=kv_cache_dtype,
        kernels=cast("KernelMode | None", kernels),
        fused_ops=fused_ops,
        decode_attention=decode_attention,
        kv_cache_gib=kv_cache_gib,
        extra=tuple(vllm_args or ()),
    )


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
