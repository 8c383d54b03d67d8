"""Which of vLLM's arguments a worker passes on, and which would undo what taut promises of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from taut_deploy.cache_scheme import INT8_CACHE, asked_cache
from taut_deploy.checkpoint import Manifest
from taut_deploy.errors import WorkerError
from taut_deploy.vllm_flags import ATTENTION_FLAGS, GRAPH_FLAGS, flag_of, is_written_as
from taut_deploy.worker.spec import Platform, WorkerSpec

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
            INT8_CACHE,
        }
    ),
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


def guarded_flags(*, fused_ops: bool, decode_attention: bool) -> dict[str, str]:
    """Return the flags that are not passed on, and what to use in their place.

    Args:
        fused_ops: whether the launcher itself says what these take.
        decode_attention: likewise.
    """
    guarded = _GUARDED_FLAGS | (_FUSED_FLAGS if fused_ops else {})
    return guarded | (_ATTENTION_FLAGS if decode_attention else {})


def check_kv_cache_dtype(name: str, platform: Platform) -> None:
    """Refuse an element type of the KV cache that vLLM would take and not implement.

    Args:
        name: as vLLM spells it.
        platform: installed platform.

    Raises:
        WorkerError: names those that are.
    """
    allowed = KV_CACHE_DTYPES[platform]
    if name not in allowed:
        raise WorkerError(
            f"--kv-cache-dtype {name}: not implemented on {platform}; "
            f"use one of {', '.join(sorted(allowed))}"
        )


def with_asked_cache(
    spec: WorkerSpec, manifest: Manifest | None, platform: Platform
) -> tuple[WorkerSpec, str | None]:
    """The worker with the KV cache its checkpoint's recipe asks for, and a line that says so.

    Args:
        spec: the worker; a ``--kv-cache-dtype`` of its own stays.
        manifest: the verified manifest, None for an uncompressed model.
        platform: installed platform.
    """
    asked = None if manifest is None else asked_cache(manifest.recipe)
    if asked is None or read_extra(spec, {})[0] != "auto":
        return spec, None
    if asked not in KV_CACHE_DTYPES[platform]:
        return spec, (
            f"the checkpoint's recipe asks for a KV cache in {asked}, which vLLM does not have on "
            f"{platform}: keys and values stay in 16 bits (a GPU has it)"
        )
    return replace(spec, kv_cache_dtype=asked), f"KV cache: {asked}, as the checkpoint asks"


def read_extra(spec: WorkerSpec, guarded_flags: Mapping[str, str]) -> tuple[str, Sequence[str]]:
    """Return the KV-cache dtype wherever it was given, and the other extra arguments.

    vLLM takes the last of two equal flags, ``_`` for ``-``, dotted keys, and unambiguous beginnings
    of a flag, so all of these are looked at.

    Args:
        spec: the worker.
        guarded_flags: flags that are not passed on, and what to use in their place.

    Raises:
        WorkerError: an extra argument is one of them.
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
