"""Run the workers and the gateway until Ctrl-C, and say when they answer."""

import asyncio
import http.client
import json
import os
import shlex
import signal
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from taut_deploy.errors import WorkerError
from taut_deploy.files import write_text_atomically
from taut_deploy.models.remote_code import FLAG
from taut_deploy.progress import Say
from taut_deploy.serve.phases import StartPhases
from taut_deploy.serve.prepare import ServedModel, gateway_configuration
from taut_deploy.serve.process import ChildSpec, SupervisedProcess
from taut_deploy.serve.running import forget_running, note_running
from taut_deploy.serve.settings import ServeSettings
from taut_deploy.worker import WorkerSpec, cpu_layout, installed_platform, worker_command

_POLL_S = 0.5
_READY_POLL_S = 2.0
_WORKER_GRACE_S = 40.0
_GATEWAY_GRACE_S = 35.0


@dataclass(frozen=True)
class SharedMachine:
    """What the workers of one ``taut serve`` have in common.

    Args:
        compiled: directory of what they compile; None leaves it where vLLM puts it.
        environment: on a CPU, processes and threads, the cores divided among the workers.
    """

    compiled: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def shared_machine(
    settings: ServeSettings, workers: int, compiled: Path, environment: Mapping[str, str]
) -> SharedMachine:
    """Return what the workers are told of the machine: something on a CPU, on GPUs nothing.

    Args:
        settings: what to serve.
        workers: of all models.
        compiled: directory for what is compiled, unless ``TAUT_COMPILE_CACHE`` names one.
        environment: of this process, which the workers inherit.
    """
    if installed_platform() != "cpu":
        return SharedMachine()
    layout = cpu_layout.environment_of(
        settings.vllm_args, environment, cpu_layout.cores_here(), workers
    )
    return SharedMachine(None if environment.get("TAUT_COMPILE_CACHE") else compiled, layout)


def worker_child(
    model: ServedModel,
    index: int,
    settings: ServeSettings,
    logs: Path,
    machine: SharedMachine = SharedMachine(),
) -> ChildSpec:
    """How to start one worker of ``model``: through ``taut worker``, as anybody else would."""
    requires = settings.kernels == "require"
    spec = WorkerSpec(
        checkpoint=model.directory,
        name=model.name,
        port=model.ports[index],
        max_model_len=settings.max_model_len,
        kv_cache_dtype=settings.kv_cache_dtype,
        kv_cache_gib=settings.kv_cache_gib,
        kernels=None if requires and model.manifest is None else settings.kernels,
        fused_ops=settings.fused_ops,
        decode_attention=settings.decode_attention,
        cache=machine.compiled,
        extra=((FLAG,) if settings.trust_remote_code else ()) + settings.vllm_args,
    )
    name = f"{model.name}-{index}"
    environment = {**machine.environment, "PYTHONSAFEPATH": "1"}
    return ChildSpec(name, worker_command(spec), environment, logs / f"{name}.log", _WORKER_GRACE_S)


def gateway_child(configuration: Path, logs: Path) -> ChildSpec:
    """How to start the gateway."""
    argv = (sys.executable, "-m", "taut_service", "--config", str(configuration))
    return ChildSpec(
        "gateway", argv, {"PYTHONSAFEPATH": "1"}, logs / "gateway.log", _GATEWAY_GRACE_S
    )


def curl_line(settings: ServeSettings, model: str) -> str:
    """A completion request that can be pasted into a shell."""
    body = json.dumps(
        {"model": model, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
        allow_nan=False,
    )
    url = f"http://{settings.host}:{settings.port}/v1/completions"
    return f"curl -s {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def serve(
    settings: ServeSettings,
    models: list[ServedModel],
    logs: Path,
    compiled: Path,
    say: Say,
    *,
    detached: bool = False,
) -> None:
    """Start everything, report readiness, and block until SIGINT or SIGTERM.

    Args:
        settings: what to serve.
        models: prepared already.
        logs: directory of the gateway's configuration and everybody's logs.
        compiled: directory for what workers on a CPU compile.
        say: prints one line for the user.
        detached: whether nobody waits for this process.

    Raises:
        WorkerError: if a process cannot be started or never becomes ready.
    """
    logs.mkdir(parents=True, exist_ok=True)
    configuration = logs / "gateway.yaml"
    write_text_atomically(
        configuration, yaml.safe_dump(gateway_configuration(settings, models), sort_keys=False)
    )
    children = [SupervisedProcess(gateway_child(configuration, logs), say)]
    workers = sum(len(model.ports) for model in models)
    machine = shared_machine(settings, workers, compiled, os.environ)
    for model in models:
        children += [
            SupervisedProcess(worker_child(model, index, settings, logs, machine), say)
            for index in range(len(model.ports))
        ]
    say(f"starting {len(children) - 1} worker(s) and the gateway; logs in {logs}")
    names = [child.spec.name for child in children]
    served = [model.name for model in models]
    note_running(logs, settings.host, settings.port, served, names, detached=detached)
    try:
        asyncio.run(_supervise(children, settings, models, say))
    finally:
        forget_running(logs)


async def _supervise(
    children: list[SupervisedProcess], settings: ServeSettings, models: list[ServedModel], say: Say
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    runs = [asyncio.create_task(child.run(), name=child.spec.name) for child in children]
    watch = asyncio.create_task(_announce_readiness(children, settings, models, say))
    stopped = asyncio.create_task(stop.wait())
    waited: list[asyncio.Task[Any]] = [*runs, stopped]
    try:
        done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        say("stopping")
        # The gateway first: it refuses new requests and lets live streams finish while workers
        # still run.
        for group in (runs[:1], runs[1:]):
            for task in group:
                task.cancel()
            await asyncio.gather(*group, return_exceptions=True)
        stopped.cancel()
    for task in done - {stopped}:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
        raise WorkerError(f"{task.get_name()} stopped by itself")


async def _announce_readiness(
    children: list[SupervisedProcess], settings: ServeSettings, models: list[ServedModel], say: Say
) -> None:
    """Follow ``/health/ready``: print the curl line when it turns green, say when it turns red."""
    ready = False
    phases = StartPhases(children[1:], say)
    while True:
        now = await asyncio.to_thread(
            is_ready, f"http://{settings.host}:{settings.port}/health/ready"
        )
        if now != ready:
            ready = now
            if now:
                for child in children:
                    child.mark_ready()
            say(
                "ready. Try:\n\n    " + curl_line(settings, models[0].name) + "\n"
                if now
                else "not ready"
            )
        if not ready:
            phases.report()
        await asyncio.sleep(_READY_POLL_S if ready else _POLL_S)


def is_ready(url: str) -> bool:
    """Whether a gateway's ``/health/ready`` is green."""
    try:
        # Our own loopback address.
        with urllib.request.urlopen(url, timeout=2) as response:  # noqa: S310
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):  # URLError is an OSError
        return False
