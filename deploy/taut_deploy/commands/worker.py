"""``taut worker``."""

import ipaddress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from taut_deploy.checkpoint import is_checkpoint
from taut_deploy.commands.given_model import announce_code
from taut_deploy.commands.option_groups import with_groups
from taut_deploy.commands.options import TrustRemoteCodeFlag, VllmArguments
from taut_deploy.commands.worker_options import (
    ApiOptions,
    ContextOptions,
    KernelOptions,
    KvCacheGib,
    ProcessOptions,
    VerdictOptions,
    worker_spec,
)
from taut_deploy.errors import WorkerError
from taut_deploy.models.directory import read_shape
from taut_deploy.models.remote_code import FLAG
from taut_deploy.vllm_flags import names_one_of
from taut_deploy.worker import exec_worker


@with_groups
def worker(
    *,
    checkpoint: Annotated[
        Path, typer.Argument(help="taut checkpoint, or an uncompressed model directory.")
    ],
    vllm_args: VllmArguments = None,
    api: ApiOptions,
    context: ContextOptions,
    kv_cache_gib: KvCacheGib = 1,
    kernels: KernelOptions,
    process: ProcessOptions,
    verdict: VerdictOptions,
    trust_remote_code: TrustRemoteCodeFlag = False,
) -> None:
    """Verify a checkpoint and become a vLLM server for it, on loopback unless told."""
    extra = list(vllm_args or ())
    if trust_remote_code and not names_one_of(extra, (FLAG,)):
        extra.insert(0, FLAG)
    # Given to vLLM directly it means the same, and the files are named as well.
    trusted = names_one_of(extra, (FLAG,))
    if not _is_address(api.host):
        raise WorkerError(
            f"--host {api.host}: not an IP address; for example 0.0.0.0 or a pod's own"
        )
    announce_code(checkpoint, trusted)
    if trusted and context.max_model_len is None and not is_checkpoint(checkpoint):
        shape = read_shape(checkpoint, trust_remote_code=True)
        context = replace(context, max_model_len=shape.max_position_embeddings)
    exec_worker(
        replace(
            worker_spec(checkpoint, extra, context, kernels, kv_cache_gib),
            name=api.name,
            host=api.host,
            port=api.port,
            shutdown_timeout_s=process.shutdown_timeout,
            cache=process.cache,
            tune_budget_s=process.tune_budget_s,
            require_verdict=verdict.require_verdict,
            trust=verdict.trust,
            verification=process.verify,
        )
    )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
