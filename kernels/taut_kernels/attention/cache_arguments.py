"""What paged decode takes: shapes, dtypes and layouts, and the error for each."""

from __future__ import annotations

import torch
from torch import Tensor

from taut_kernels.attention.arguments import DTYPES, HEAD_DIMS

EIGHT_BIT = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
"""Element type of a cache → its format."""
MAX_QUERIES = 8
_LEAST_PAGE = 16
_MAX_GRID = 65535
_MAX_OFFSET = 2**31


def check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_lens: Tensor
) -> None:
    """Refuse tensors that the contract of :mod:`.decode.op` does not allow.

    Args:
        q: [B, T, Hq, D].
        k_cache: keys.
        v_cache: values.
        block_table: pages of each sequence.
        context_lens: keys of each sequence.

    Raises:
        ValueError: names the argument.
    """
    _check_queries(q)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_cache(name, cache, q)
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"v_cache must be as k_cache, {tuple(k_cache.shape)} {k_cache.dtype}, "
            f"got {tuple(v_cache.shape)} {v_cache.dtype}"
        )
    if not k_cache.shape[2] or q.shape[2] % k_cache.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads, not a multiple of the {k_cache.shape[2]} of k_cache"
        )
    for name, x, dims in (("block_table", block_table, 2), ("context_lens", context_lens, 1)):
        form = "[B, most pages]" if dims == 2 else "[B]"
        if x.dim() != dims or x.dtype != torch.int32 or x.shape[0] != q.shape[0]:
            raise ValueError(
                f"{name} must be {form} int32 with B = {q.shape[0]}, got {tuple(x.shape)} {x.dtype}"
            )
        if x.device != q.device or (x.stride(-1) != 1 and x.numel() > 1):
            raise ValueError(f"{name} must be on {q.device} with elements next to each other")


def _check_queries(q: Tensor) -> None:
    if q.dim() != 4:
        raise ValueError(f"q must be [B, Hq, D] or [B, T, Hq, D], got shape {tuple(q.shape)}")
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be bfloat16 or float16, got {q.dtype}")
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(f"q must have heads of 64, 96, 128 or 256 elements, got {q.shape[3]}")
    if not 1 <= q.shape[1] <= MAX_QUERIES:
        raise ValueError(f"q must have 1 to {MAX_QUERIES} queries a sequence, got {q.shape[1]}")
    if q.stride(-1) != 1 and q.numel():
        raise ValueError("q must have the elements of a head next to each other")
    if max(q.shape[0], q.shape[2]) > _MAX_GRID:
        raise ValueError(f"q: at most {_MAX_GRID} sequences and heads, got {tuple(q.shape)}")


def _check_cache(name: str, cache: Tensor, q: Tensor) -> None:
    if cache.dim() != 4:
        raise ValueError(f"{name} must be [pages, page size, Hk, D], got {tuple(cache.shape)}")
    if cache.dtype not in EIGHT_BIT and cache.dtype != q.dtype:
        raise ValueError(f"{name} must be {q.dtype} as q, float8_e4m3fn or int8, got {cache.dtype}")
    if cache.device != q.device:
        raise ValueError(f"{name} must be on {q.device}, got {cache.device}")
    if cache.shape[3] != q.shape[3]:
        raise ValueError(f"{name} must have heads of {q.shape[3]} as q, got {cache.shape[3]}")
    page = cache.shape[1]
    if page < _LEAST_PAGE or page & (page - 1):
        raise ValueError(f"{name} must have pages of a power of two of at least 16, got {page}")
    if cache.stride(3) != 1 and cache.numel():
        raise ValueError(f"{name} must have the elements of a head next to each other")
    if page * cache.stride(1) >= _MAX_OFFSET:
        raise ValueError(f"{name}: a page spans {page * cache.stride(1)} elements, at most 2**31")
    if cache.element_size() == 1 and any(stride % 2 for stride in cache.stride()[:3]):
        raise ValueError(f"{name} must have even strides: pairs of elements are read as one word")


def check_scale(name: str, scale: Tensor | None, k_cache: Tensor) -> None:
    """Refuse a scale that is neither one number nor one a key head.

    Args:
        name: of the argument.
        scale: fp32, or None.
        k_cache: [.., Hk, D].

    Raises:
        ValueError: names the argument.
    """
    if scale is None:
        return
    heads = k_cache.shape[2]
    if scale.dtype != torch.float32 or scale.dim() > 1 or scale.numel() not in (1, heads):
        raise ValueError(
            f"{name} must be fp32 with 1 or {heads} elements, got {tuple(scale.shape)} "
            f"{scale.dtype}"
        )
    if scale.device != k_cache.device:
        raise ValueError(f"{name} must be on {k_cache.device}, got {scale.device}")


def check_arrivals(arrivals: Tensor | None, q: Tensor) -> None:
    """Refuse counters that are too few, of another type or elsewhere.

    Args:
        arrivals: of :func:`.decode.op.make_arrivals`, or None.
        q: [B, T, Hq, D].

    Raises:
        ValueError: names the argument.
    """
    if arrivals is None:
        return
    needed = q.shape[0] * q.shape[2] * q.shape[1]
    if arrivals.dtype != torch.int32 or arrivals.numel() < needed or not arrivals.is_contiguous():
        raise ValueError(f"arrivals must hold {needed} int32, from make_arrivals")
    if arrivals.device != q.device:
        raise ValueError(f"arrivals must be on {q.device}, got {arrivals.device}")
