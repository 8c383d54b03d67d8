"""Which attention layers of vLLM decode on `taut::paged_decode`, and why not.

vLLM takes an attention backend by name. Ours is registered under :data:`BACKEND` in every worker
process (:func:`install`) and does nothing until vLLM is told to use it: the launcher passes
:func:`engine_options` (``taut worker``: for plain models by default, for others on
``--decode-attention``). Then each layer is asked once
(:func:`why_not_layer`) and each batch (:func:`is_plain_decode`); all others are computed by
vLLM's FlashAttention, over the same cache. ``TAUT_KERNELS=prefer`` takes what was measured on that
card, ``require`` whatever the op allows. The backend itself, which imports vLLM:
:mod:`.attention_backend`.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taut_kernels.attention import tiles as attention_tiles
from taut_kernels.attention.arguments import HEAD_DIMS, padded_dim
from taut_kernels.launch import tile_tables
from taut_kernels.vllm_plugin import record
from taut_kernels.vllm_plugin.mode import requested_mode

BACKEND = "CUSTOM"
"""The name that vLLM keeps free for backends of others."""
CLASS_PATH = "taut_kernels.vllm_plugin.attention_backend.TautAttentionBackend"
ELEMENT_BYTES = {"auto": 2, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1}
"""``--kv-cache-dtype`` → bytes of an element, of those that ours reads."""
SPECIAL_MASKS = ("mm_prefix_range_tensor", "mm_prefix_query_range_tensor", "rswa_prefix_lens")
"""Of a batch, whatever vLLM's version calls it: masks that are neither causal nor a window."""
_NOT_MEASURED = "not measured against vLLM's on {}; TAUT_KERNELS=require runs it"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What decides whether a layer may decode on ours.

    Attributes:
        heads: query heads of this rank.
        kv_heads: key heads.
        head_dim: elements of one.
        kv_cache_dtype: as ``--kv-cache-dtype`` spells it.
        decoder: whether it is a decoder's attention to its own tokens.
        extras: what it adds to a causal softmax, in words; a window is no extra.
        context_parallel: whether ranks share a sequence's keys.
        batch_invariant: whether results must not depend on the batch.
        two_streams: whether two halves of a batch run beside each other.
        sleeps: whether the worker may give its memory away and get it back.
    """

    heads: int
    kv_heads: int
    head_dim: int
    kv_cache_dtype: str
    decoder: bool = True
    extras: tuple[str, ...] = ()
    context_parallel: bool = False
    batch_invariant: bool = False
    two_streams: bool = False
    sleeps: bool = False


def _measured(gpu: str, head_dim: int | None = None, element_bytes: int | None = None) -> bool:
    table = tile_tables.of_card(attention_tiles.tables(), gpu)
    return table is not None and any(
        kernel == "decode" and head_dim in (None, dim) and element_bytes in (None, size)
        for kernel, dim, size, _ in table.choices
    )


def why_not_used(gpu: str | None, mode: str) -> str | None:
    """Say why a worker's attention stays with vLLM altogether.

    Args:
        gpu: card name as `torch.cuda.get_device_name` spells it, None without CUDA.
        mode: value of ``TAUT_KERNELS``.

    Returns:
        A reason, or None where layers are asked one by one.
    """
    if mode == "off":
        return "TAUT_KERNELS=off"
    if gpu is None:
        return "no CUDA device"
    if mode == "prefer" and not _measured(gpu):
        return _NOT_MEASURED.format(gpu)
    return None


def engine_options(gpu: str | None, mode: str) -> dict[str, str]:
    """Return what vLLM has to be told beside loading the plugin.

    Args:
        gpu: as for :func:`why_not_used`.
        mode: likewise.

    Returns:
        Flags and their values; empty where ours is not used.
    """
    return {} if why_not_used(gpu, mode) else {"--attention-backend": BACKEND}


def why_not_layer(facts: LayerFacts, gpu: str | None, mode: str) -> str | None:
    """Say why a layer decodes on vLLM's kernel although our backend was asked for.

    Args:
        facts: of the layer.
        gpu: as for :func:`why_not_used`.
        mode: likewise.

    Returns:
        A reason, or None where single-token decodes are ours.
    """
    if reason := why_not_used(gpu, mode) or _why_not_semantics(facts):
        return reason
    dim, size = facts.head_dim, ELEMENT_BYTES.get(facts.kv_cache_dtype)
    if dim not in HEAD_DIMS:
        return f"heads of {dim} elements"
    if size is None:
        return f"KV cache of {facts.kv_cache_dtype}"
    assert gpu is not None
    if mode == "prefer" and not _measured(gpu, padded_dim(dim), size):
        return _NOT_MEASURED.format(f"{gpu} with heads of {dim} and {8 * size} bits")
    return None


def _why_not_semantics(facts: LayerFacts) -> str | None:
    if not facts.decoder:
        return "no decoder's attention to its own tokens"
    if facts.extras:
        return f"with {' and '.join(facts.extras)}"
    if facts.heads % facts.kv_heads:
        return f"{facts.heads} query heads over {facts.kv_heads} key heads"
    if facts.context_parallel:
        return "context parallel"
    if facts.batch_invariant:
        return "VLLM_BATCH_INVARIANT"
    if facts.two_streams:
        # They would count their programs in the same memory.
        return "two halves of a batch at once (DBO)"
    # What comes back with a cache's memory is nobody's: the counters would not be 0.
    return "sleep mode" if facts.sleeps else None


def is_plain_decode(metadata: Any, window: tuple[int, int]) -> bool:
    """Say whether every sequence of a batch has one new token and sees its keys causally.

    As many tokens as sequences, none with more than one. Sequences that pad a CUDA graph have no
    keys and come last, so that tokens and sequences have the same numbers there, too.

    Args:
        metadata: vLLM's `FlashAttentionMetadata`, of any version.
        window: keys before and behind a query that the layer lets it see, -1 for all.
    """
    return (
        metadata.max_query_len == 1
        and metadata.num_actual_tokens == metadata.seq_lens.shape[0]
        and metadata.causal is True
        and not getattr(metadata, "use_cascade", False)
        and getattr(metadata, "sliding_window", None) in (None, window)
        and all(getattr(metadata, name, None) is None for name in SPECIAL_MASKS)
    )


_arrivals: dict[torch.device, Tensor] = {}


def shared_arrivals(count: int, device: torch.device) -> Tensor:
    """Return at least so many counters, zeros, the same ones for all layers of a device.

    Layers of a model, and a draft model beside it, follow each other on one stream, and each leaves
    the counters at zero; so do the launches of a captured graph, whose replays follow each other
    likewise. Where two halves of a batch run on two streams, layers are refused
    (:attr:`LayerFacts.two_streams`). Asked before anything is captured: the memory must not belong
    to a graph.

    Args:
        count: sequences × query heads, at most.
        device: of the cache.
    """
    found = _arrivals.get(device)
    if found is None or found.numel() < count:
        # Graphs captured with a smaller one keep it: their layers hold on to it.
        found = _arrivals[device] = torch.zeros(count, dtype=torch.int32, device=device)
    return found


def card() -> str | None:
    """Return the name of the card this process serves from, None without CUDA."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    name: str = current_platform.get_device_name()
    return name


def install() -> None:
    """Register our backend in this process; where another plugin has the name, it keeps it."""
    from vllm.v1.attention.backends import registry

    from taut_kernels.vllm_plugin import compat

    if not compat.register_attention_backend(registry, BACKEND, CLASS_PATH):
        _logger.warning("attention backend %s belongs to another plugin: not ours", BACKEND)


def why_not_written(
    key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor, dtype: torch.dtype | None
) -> str:
    """Say what a layer of ours finds in new keys and values that it was not prepared for.

    Args:
        key: [tokens, Hk, D].
        value: likewise.
        kv_cache: of the layer.
        slots: [tokens].
        dtype: that it was prepared for.
    """
    if key.dtype is not dtype or value.dtype is not dtype:
        return f"keys of {key.dtype} and values of {value.dtype} where the model has {dtype}"
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        return "elements of a key or value that are not next to each other"
    if slots.dtype is not torch.int64:
        return f"slots of {slots.dtype}"
    return f"keys of {key.dtype} for a cache of {kv_cache.dtype}"


def say_not_written(reason: str) -> None:
    """Log once why layers whose decodes are ours have their cache written by vLLM, and record it.

    Args:
        reason: of one of them, which has it as ``why_not_written`` already.
    """
    if reason not in _said:
        _said.add(reason)
        _logger.warning("cache writes not ours: %s", reason)
    correct_record()


_said: set[str] = set()
_layers: list[weakref.ref[torch.nn.Module]] = []
"""Attention layers of the model loaded last: that is whose record there is."""


def conclude(model: torch.nn.Module, mode: str) -> dict[str, list[dict[str, Any]]]:
    """Count the attention layers of a loaded model by who decodes, and who writes the cache.

    Args:
        model: as vLLM loaded it.
        mode: ``prefer`` or ``require``.

    Returns:
        ``attention`` and ``cache_writes``, each a list of ``owner`` (``taut`` or ``vllm``),
        ``reason`` (why not ours, or None) and ``layers``, of each distinct pair.
    """
    _layers[:] = [
        weakref.ref(module)
        for module in model.modules()
        if getattr(module, "impl", None) is not None and hasattr(module, "attn_backend")
    ]
    return _counted(mode)


def correct_record() -> None:
    """Count again and write that to the record: a layer turned out otherwise than at loading."""
    record.correct(_counted(requested_mode()))


def _counted(mode: str) -> dict[str, list[dict[str, Any]]]:
    unused = why_not_used(card(), mode) or "not asked for (taut worker --decode-attention)"
    decodes: Counter[str | None] = Counter()
    writes: Counter[str | None] = Counter()
    for layer in filter(None, (found() for found in _layers)):
        impl = layer.impl
        reason = getattr(impl, "why_not_ours", f"{unused}; vLLM {type(impl).__name__}")
        decodes[reason] += 1
        # One that shares another layer's cache writes nothing.
        if getattr(layer, "kv_sharing_target_layer_name", None) is None:
            writes[reason or getattr(impl, "why_not_written", None)] += 1
    return {"attention": _rows(decodes), "cache_writes": _rows(writes)}


def _rows(counts: Counter[str | None]) -> list[dict[str, Any]]:
    return [
        {"owner": "vllm" if reason else "taut", "reason": reason, "layers": count}
        for reason, count in counts.items()
    ]


def summary(found: list[dict[str, Any]]) -> str:
    """Put a record in one line.

    Args:
        found: ``attention`` of what :func:`conclude` returned.
    """
    parts = []
    for row in found:
        reason = f" ({row['reason']})" if row["reason"] else ""
        parts.append(f"decode attention={row['owner']} ×{row['layers']}{reason}")
    return ", ".join(parts) or "no attention layer"
