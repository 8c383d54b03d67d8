"""``taut plan``."""

from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.commands.options import JsonFlag
from taut_deploy.commands.output import print_json
from taut_deploy.errors import WorkerError
from taut_deploy.home import TautHome
from taut_deploy.models import ModelStore
from taut_deploy.models.directory import require_model_directory
from taut_deploy.sizing import GIB, KV_BYTES, Demand, Plan
from taut_deploy.sizing import plan as work_out


def plan(
    models: Annotated[
        list[str], typer.Argument(help="Checkpoints or models, by directory or by name.")
    ],
    memory_gib: Annotated[
        float, typer.Option(min=0.1, help="Memory of one device that a worker may use, GiB.")
    ],
    reserve_gib: Annotated[
        float, typer.Option(min=0, help="Of it for process, activations and CUDA graphs.")
    ] = 2.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a typical request.")] = 1024,
    completion_tokens: Annotated[int, typer.Option(min=1, help="Of a typical request.")] = 256,
    kv_cache_dtype: Annotated[str, typer.Option(help="KV-cache element type.")] = "auto",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices for one copy.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Copies of each model.")] = 1,
    as_json: JsonFlag = False,
) -> None:
    """Say what fits: weights, KV cache, requests at a time, and the limits that follow from it."""
    if kv_cache_dtype not in KV_BYTES:
        raise WorkerError(f"--kv-cache-dtype: {kv_cache_dtype!r} is none of {', '.join(KV_BYTES)}")
    demand = Demand(
        memory_gib,
        reserve_gib,
        prompt_tokens,
        completion_tokens,
        kv_cache_dtype,
        tensor_parallel,
        workers,
    )
    store = ModelStore(TautHome.from_environment().models)
    plans = [work_out(name, _directory(store, name), demand) for name in models]
    if as_json:
        print_json([found.as_json() for found in plans])
        return
    for found in plans:
        _print(found, demand)


def _directory(store: ModelStore, name: str) -> Path:
    # The store would read a directory's weights for their digest; sizes do not need them.
    path = Path(name).expanduser()
    if not path.is_dir():
        return Path(store.find(name).path)
    require_model_directory(path)
    return path


def _print(found: Plan, demand: Demand) -> None:
    of_request = f"{demand.prompt_tokens} + {demand.completion_tokens}"
    for line in (
        found.name,
        f"  weights               {found.weights_bytes / GIB:.2f} GiB a device",
        f"  KV cache              {found.kv_bytes / GIB:.2f} GiB a device, "
        f"{found.kv_bytes_per_token} B a token",
        f"  fits                  {found.kv_tokens} tokens, {found.requests} requests of "
        f"{of_request}",
        f"  worker                --max-num-seqs={found.requests}",
        f"  gateway               admission: {{max_inflight: {found.max_inflight}, "
        f"max_inflight_tokens: {found.max_inflight_tokens}}}",
    ):
        typer.echo(line)
