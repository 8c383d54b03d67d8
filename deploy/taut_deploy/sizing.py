"""What a model needs of a device: bytes of weights, of KV cache, and how many requests fit.

Arithmetic on ``config.json`` and file sizes; nothing is loaded and nothing measured. vLLM's own
figure is in its log ("GPU KV cache size"); this one is for choosing hardware and limits before.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from taut_deploy.cache_scheme import INT8_CACHE, asked_cache, declared_cache
from taut_deploy.checkpoint import MANIFEST, read_manifest
from taut_deploy.diagnose.layer_shapes import stored_layers
from taut_deploy.diagnose.own_format import own_layers
from taut_deploy.errors import WorkerError
from taut_deploy.models.directory import read_config, weight_files

GIB = 2**30
KV_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
KV_BYTES |= {INT8_CACHE: 1, "fp8_per_token_head": 1}
"""Bytes per element by vLLM's ``--kv-cache-dtype``; ``auto`` is the model's, 16 bits here
unless its config.json declares a cache."""
_SERVED_BITS = 16
_SCALE_BYTES = 4
BLOCK_TOKENS = 16
"""vLLM hands out the KV cache in blocks of this many tokens."""


@dataclass(frozen=True)
class Demand:
    """What is asked of a worker.

    Args:
        memory_gib: memory of one device that the worker may use, GiB.
        reserve_gib: what of it neither weights nor KV cache get: the process, activations, CUDA
            graphs. Depends on model, batch and engine: a guess until a worker was looked at.
        prompt_tokens: of a typical request.
        completion_tokens: likewise.
        kv_cache_dtype: a key of :data:`KV_BYTES`.
        tensor_parallel: devices that share one copy of the model.
        workers: copies of the model.
    """

    memory_gib: float
    reserve_gib: float = 2.0
    prompt_tokens: int = 1024
    completion_tokens: int = 256
    kv_cache_dtype: str = "auto"
    tensor_parallel: int = 1
    workers: int = 1


@dataclass(frozen=True)
class Plan:
    """What fits; bytes are of one device, requests and tokens of one worker unless said otherwise.

    Args:
        name: of the model.
        weights_bytes: its share of the weights.
        kv_bytes_per_token: its share of one token.
        kv_bytes: what is left for the KV cache.
        kv_tokens: tokens that fit, in whole blocks.
        requests: typical requests at a time; vLLM's ``--max-num-seqs``.
        max_inflight: the same of all workers; the gateway's ``admission.max_inflight``.
        max_inflight_tokens: tokens of all workers; ``admission.max_inflight_tokens``.
    """

    name: str
    weights_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    kv_tokens: int
    requests: int
    max_inflight: int
    max_inflight_tokens: int

    def as_json(self) -> dict[str, object]:
        """The plan as plain data."""
        return asdict(self)


def kv_bytes_per_token(directory: Path, kv_cache_dtype: str = "auto", parallel: int = 1) -> int:
    """Bytes of KV cache that one token takes on one device.

    Keys and values of every layer; a device holds its share of the heads, at least one. Layers with
    a sliding window are counted in full, so for such models this is an upper bound.

    Args:
        directory: the model's.
        kv_cache_dtype: a key of :data:`KV_BYTES`.
        parallel: devices that share one copy.

    Raises:
        ModelError: no readable ``config.json``.
        WorkerError: a size is missing, or this attention keeps no keys and values by head.
    """
    config = read_config(directory)
    if kv_cache_dtype == "auto" and declared_cache(config) is not None:
        kv_cache_dtype = "fp8"
    elif kv_cache_dtype == "auto" and (directory / MANIFEST).is_file():
        kv_cache_dtype = asked_cache(read_manifest(directory).recipe) or "auto"
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    if "kv_lora_rank" in config:
        raise WorkerError(f"{directory}: keeps a latent KV cache (kv_lora_rank), not counted here")
    heads = _size(directory, config, "num_attention_heads")
    kv_heads = _size(directory, config, "num_key_value_heads", heads)
    per_head = config.get("head_dim") or _size(directory, config, "hidden_size") // heads
    layers = _size(directory, config, "num_hidden_layers")
    here = max(1, -(-kv_heads // parallel))
    head_bytes = int(per_head) * KV_BYTES[kv_cache_dtype]
    if kv_cache_dtype.endswith("per_token_head"):
        head_bytes += _SCALE_BYTES
    return 2 * layers * here * head_bytes


def plan(name: str, directory: Path, demand: Demand) -> Plan:
    """Work out what fits.

    Args:
        name: how to call it.
        directory: the model's or the checkpoint's.
        demand: what is asked.

    Raises:
        ModelError: the directory is no model.
        WorkerError: the weights do not fit, or the KV cache holds less than one request.
    """
    weights = sum(path.stat().st_size for path in weight_files(directory))
    weights += _grown_at_load(directory, demand.tensor_parallel)
    share = -(-weights // demand.tensor_parallel)
    per_token = kv_bytes_per_token(directory, demand.kv_cache_dtype, demand.tensor_parallel)
    left = int((demand.memory_gib - demand.reserve_gib) * GIB) - share
    if left <= 0:
        raise WorkerError(
            f"{name}: {share / GIB:.2f} GiB of weights and {demand.reserve_gib:g} GiB of reserve "
            f"do not fit into --memory-gib {demand.memory_gib:g}; use more memory, more "
            "--tensor-parallel, or fewer bits"
        )
    tokens = left // (per_token * BLOCK_TOKENS) * BLOCK_TOKENS
    of_request = demand.prompt_tokens + demand.completion_tokens
    requests = tokens // of_request
    if requests == 0:
        raise WorkerError(
            f"{name}: the KV cache holds {tokens} tokens, a request has {of_request}; use more "
            "memory, --kv-cache-dtype fp8, or shorter requests"
        )
    return Plan(
        name=name,
        weights_bytes=share,
        kv_bytes_per_token=per_token,
        kv_bytes=left,
        kv_tokens=tokens,
        requests=requests,
        max_inflight=requests * demand.workers,
        max_inflight_tokens=tokens * demand.workers,
    )


def _grown_at_load(directory: Path, parallel: int) -> int:
    """Bytes by which codebooks grow when a worker dequantises them.

    Raises:
        WorkerError: the layers of such a checkpoint cannot be shared among devices.
    """
    described = own_layers(read_config(directory))
    if described is None:
        return 0
    if parallel > 1:
        raise WorkerError(
            f"{directory}: is of quant_method taut, which is served on one device; leave "
            "--tensor-parallel out"
        )
    from taut_kernels.for_deploy import layer_description as told

    shapes = stored_layers(directory, told.METHOD, 4)
    return sum(
        shapes[name].n * shapes[name].k * (_SERVED_BITS - layer.bits) // 8
        for name, layer in described.items()
        if isinstance(layer, told.Codebook) and name in shapes
    )


def _size(directory: Path, config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WorkerError(f"{directory}/config.json: {name}: expected a whole number above 0")
    return value
