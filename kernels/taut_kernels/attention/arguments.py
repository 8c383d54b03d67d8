"""What attention takes: shapes, dtypes and layouts, and the error for each."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 96, 128, 256)
_MAX_GRID = 65535
_LEAST_BLOCK = 32
"""Queries or keys of the smallest tile. Triton multiplies a grid's sides in 32 bits and launches
nothing where that is not positive."""


def padded_dim(dim: int) -> int:
    """Return the power of two that a head of ``dim`` elements is computed as."""
    return 128 if dim == 96 else dim


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int | None,
    max_k: int | None,
) -> None:
    """Refuse what the contract of :mod:`.prefill.op` does not allow.

    Args:
        q: queries.
        k: keys.
        v: values.
        cu_q: bounds of packed sequences, or None for a batch.
        cu_k: likewise.
        max_q: longest sequence, given exactly where sequences are packed.
        max_k: likewise.

    Raises:
        ValueError: names the argument.
    """
    dims, form = (4, "[B, tokens, heads, D]") if cu_q is None else (3, "[tokens, heads, D]")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims:
            raise ValueError(f"{name} must be {form}, got shape {tuple(x.shape)}")
        _check_tensor(name, x, q)
    if q.shape[-1] not in HEAD_DIMS:
        raise ValueError(f"q must have heads of 64, 96, 128 or 256 elements, got {q.shape[-1]}")
    if k.shape[-1] != q.shape[-1] or (cu_q is None and k.shape[0] != q.shape[0]):
        raise ValueError(f"k must fit q {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}")
    if not k.shape[-2] or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q has {q.shape[-2]} heads, not a multiple of the {k.shape[-2]} of k")
    _check_bounds(q, cu_q, cu_k, max_q, max_k)
    sequences = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    most = max(sequences, q.shape[-2])
    if most > _MAX_GRID:
        raise ValueError(f"at most {_MAX_GRID} sequences and heads, got {most}")
    if max_q is not None and max_k is not None:
        blocks = -(-max(max_q, max_k) // _LEAST_BLOCK)
        if blocks * sequences * q.shape[-2] >= 2**31:
            raise ValueError(
                f"max_seqlen_q and max_seqlen_k must be shorter for {sequences} sequences of "
                f"{q.shape[-2]} heads, got {max_q} and {max_k}: a launch has less than 2**31 blocks"
            )


def _check_tensor(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype not in DTYPES or x.dtype != q.dtype:
        raise ValueError(f"{name} must be bfloat16 or float16, all alike, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on {q.device}, got {x.device}")
    if x.stride(-1) != 1 and x.numel():
        raise ValueError(f"{name} must have the elements of a head next to each other")


def _check_bounds(
    q: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int | None, max_k: int | None
) -> None:
    if cu_q is None:
        if cu_k is not None or max_q is not None or max_k is not None:
            raise ValueError("cu_seqlens_k and max_seqlen are for packed sequences: cu_seqlens_q")
        return
    if max_q is None or max_k is None or max_q < 0 or max_k < 0:
        raise ValueError("max_seqlen_q must be given with cu_seqlens_q, max_seqlen_k likewise")
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu is None or cu.dim() != 1 or cu.shape[0] < 1 or cu.dtype != torch.int32:
            raise ValueError(f"{name} must be [B + 1] int32")
        if cu.device != q.device or not cu.is_contiguous():
            raise ValueError(f"{name} must be contiguous and on {q.device}")
    if cu_k is not None and cu_k.shape != cu_q.shape:
        raise ValueError("cu_seqlens_k must have as many bounds as cu_seqlens_q")


def check_bounds_of_packed(
    q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int
) -> None:
    """Refuse bounds that do not fit the tokens; reads them, so for tensors on the CPU only.

    Args:
        q: [Σ Tq, Hq, D].
        k: [Σ Tk, Hk, D].
        cu_q: bounds, or None for a batch.
        cu_k: likewise.
        max_q: longest sequence of queries.
        max_k: longest sequence of keys.

    Raises:
        ValueError: names the argument.
    """
    for name, cu, x, longest in (("q", cu_q, q, max_q), ("k", cu_k, k, max_k)):
        if cu is None:
            continue
        bounds, tokens = cu.tolist(), x.shape[0]
        counts = [last - first for first, last in pairwise(bounds)]
        if bounds[0] != 0 or min(counts, default=0) < 0 or bounds[-1] > tokens:
            raise ValueError(
                f"cu_seqlens_{name} must rise from 0 to at most the {tokens} tokens of {name}, "
                f"got {_shown(bounds)}"
            )
        if max(counts, default=0) > longest:
            raise ValueError(
                f"max_seqlen_{name} must be at least {max(counts)}, the longest sequence of "
                f"cu_seqlens_{name}, got {longest}"
            )


def _shown(numbers: list[int], most: int = 8) -> str:
    return str(numbers) if len(numbers) <= most else f"{str(numbers[:most])[:-1]}, …]"
