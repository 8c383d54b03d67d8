"""Rotary position embedding of queries and keys, in place or apart, one launch for both.

Maths     pairs (a, b) of a head's first R columns turn by the angle of their position p:
          a' = a·cos - b·sin, b' = b·cos + a·sin; neox: a = column i, b = column R/2 + i;
          interleaved (GPT-J): a = column 2i, b = column 2i + 1. Columns from R on stay.
Ops       `taut::rope`, mutates q and k; `taut::rope_apart` → q', k' (no elements for k None), which
          leaves its operands alone: for compiled graphs, where a mutated slice costs copies
Shapes    positions [T] int64   q [T, Hq, D], k [T, Hk, D] bf16|fp16|fp32, any strides with columns
          next to each other, or k None   cos_sin_cache [P, R] as q or fp32: cosines of R/2
          frequencies, then sines, as vLLM lays it out   → q' [T, Hq, D], k' [T, Hk, D] contiguous
Numerics  fp32, one rounding at the store; both ops have the same bits, from run to run too;
          columns from R on are copied
CPU       the reference, in plain torch: the specification
Limits    R even, R ≤ D; positions must lie in 0..P-1 (not checked on a GPU: that would wait for
          it); forward only; sm_80 and later
Source    RoPE: arXiv:2104.09864, §3.2.2. Cache layout: vLLM `rotary_embedding`. The rest is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch import early_start, launcher
from taut_kernels.launch.op_registration import register_op
from taut_kernels.rope import rope_launch
from taut_kernels.rope.rope_launch import Pair

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _rotate_ref(x: Tensor, cos: Tensor, sin: Tensor, neox: bool) -> None:
    half = cos.shape[-1]
    turned = x[..., : 2 * half]
    wide = turned.to(cos.dtype)
    if neox:
        a, b = wide[..., :half], wide[..., half:]
        turned.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
    else:
        a, b = wide[..., ::2], wide[..., 1::2]
        turned.copy_(torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2))


def rope_ref(
    positions: Tensor, q: Tensor, k: Tensor | None, cos_sin_cache: Tensor, neox: bool
) -> None:
    """Rotate in plain torch: the specification, and the op's CPU implementation.

    Args:
        positions: [T] int64.
        q: [T, Hq, D] floating point, overwritten; fp64 is computed in fp64.
        k: [T, Hk, D] or None, overwritten.
        cos_sin_cache: [P, R].
        neox: halves (True) or neighbours (False) form pairs.
    """
    accumulator = torch.promote_types(q.dtype, torch.float32)
    cos, sin = cos_sin_cache[positions].to(accumulator).unsqueeze(1).chunk(2, dim=-1)
    for x in (q, k):
        if x is not None:
            _rotate_ref(x, cos, sin, neox)


def rope_apart_ref(
    positions: Tensor, q: Tensor, k: Tensor | None, cos_sin_cache: Tensor, neox: bool
) -> Pair:
    """Rotate into new tensors in plain torch: specification and CPU implementation.

    Args:
        positions: [T] int64.
        q: [T, Hq, D] floating point; fp64 is computed in fp64.
        k: [T, Hk, D] or None.
        cos_sin_cache: [P, R].
        neox: as in :func:`rope_ref`.

    Returns:
        The rotated q and k, contiguous; for k None no elements.
    """
    new_q = q.clone(memory_format=torch.contiguous_format)
    new_k = None if k is None else k.clone(memory_format=torch.contiguous_format)
    rope_ref(positions, new_q, new_k, cos_sin_cache, neox)
    return new_q, q.new_empty((0,)) if new_k is None else new_k


def _launch_rope(
    positions: Tensor, q: Tensor, k: Tensor | None, cos_sin_cache: Tensor, neox: bool
) -> None:
    call = rope_launch.call_of(positions, q, k, cos_sin_cache, neox, False)
    plan = rope_launch.plan(early_start.EARLY_TOKENS, *call)
    rope_launch.run(plan, positions, q, k, cos_sin_cache, None)


def _launch_rope_apart(
    positions: Tensor, q: Tensor, k: Tensor | None, cos_sin_cache: Tensor, neox: bool
) -> Pair:
    if cos_sin_cache.shape[1] == 0:
        return rope_apart_ref(positions, q, k, cos_sin_cache, neox)  # nothing turns: copies
    shape, dtype, device = q.shape, q.dtype, q.device
    new_q = launcher.empty(shape, dtype=dtype, device=device)
    new_k = launcher.empty((0,) if k is None else k.shape, dtype=dtype, device=device)
    call = rope_launch.call_of(positions, q, k, cos_sin_cache, neox, True)
    plan = rope_launch.plan(early_start.EARLY_TOKENS, *call)
    rope_launch.run(plan, positions, q, k, cos_sin_cache, (new_q, new_k))
    return new_q, new_k


def _fake_rope(positions: Tensor, *_: Any) -> None:
    return None


def _fake_rope_apart(positions: Tensor, q: Tensor, k: Tensor | None, *_: Any) -> Pair:
    return q.new_empty(q.shape), q.new_empty((0,) if k is None else k.shape)


_ROPE = (
    "taut::rope(Tensor positions, Tensor(a!) q, Tensor(b!)? k, Tensor cos_sin_cache, bool neox) "
    "-> ()"
)
register_op(_ROPE, rope_ref, _launch_rope, _fake_rope)

# Without a layout tag: Inductor hands operands over at the strides they have in the graph, slices
# of one tensor as views. (`flexible_layout` would let it choose strides of its own.)
_ROPE_APART = (
    "taut::rope_apart(Tensor positions, Tensor q, Tensor? k, Tensor cos_sin_cache, bool neox) "
    "-> (Tensor, Tensor)"
)
register_op(_ROPE_APART, rope_apart_ref, _launch_rope_apart, _fake_rope_apart)


def rope(
    positions: Tensor,
    q: Tensor,
    k: Tensor | None,
    cos_sin_cache: Tensor,
    *,
    head_dim: int,
    neox: bool = True,
) -> None:
    """Rotate queries and keys in place.

    Args:
        positions: [T] int64 in 0..P-1, contiguous.
        q: [T, Hq, D] or [T, Hq * D] bf16, fp16 or fp32, columns next to each other, overwritten.
        k: likewise with its own number of heads, or None.
        cos_sin_cache: [P, R] contiguous, dtype of ``q`` or fp32, R even and at most ``head_dim``.
        head_dim: D.
        neox: halves of the first R columns form pairs (True), or neighbours (False).

    Raises:
        ValueError: a shape, dtype, device or layout the contract does not allow; names the
            argument.
    """
    _check_table(positions, q, cos_sin_cache, head_dim)
    q_heads = _as_heads("q", q, positions, q, head_dim)
    k_heads = None if k is None else _as_heads("k", k, positions, q, head_dim)
    torch.ops.taut.rope.default(positions, q_heads, k_heads, cos_sin_cache, neox)


def rope_apart(
    positions: Tensor,
    q: Tensor,
    k: Tensor | None,
    cos_sin_cache: Tensor,
    *,
    head_dim: int,
    neox: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Rotate queries and keys into new tensors.

    Args:
        positions: as for :func:`rope`.
        q: likewise, but left as it is.
        k: likewise, or None.
        cos_sin_cache: likewise.
        head_dim: likewise.
        neox: likewise.

    Returns:
        The rotated q and k, contiguous, in the shapes of q and k; None for k None.

    Raises:
        ValueError: as :func:`rope`.
    """
    _check_table(positions, q, cos_sin_cache, head_dim)
    q_heads = _as_heads("q", q, positions, q, head_dim)
    k_heads = None if k is None else _as_heads("k", k, positions, q, head_dim)
    found = torch.ops.taut.rope_apart.default(positions, q_heads, k_heads, cos_sin_cache, neox)
    return found[0].view(q.shape), None if k is None else found[1].view(k.shape)


def _check_table(positions: Tensor, q: Tensor, cos_sin_cache: Tensor, head_dim: int) -> None:
    if positions.dim() != 1 or positions.dtype is not torch.int64:
        shape = tuple(positions.shape)
        raise ValueError(f"positions must be [T] torch.int64, got {shape} {positions.dtype}")
    if not positions.is_contiguous():
        raise ValueError("positions must be contiguous")
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be bfloat16, float16 or float32, got {q.dtype}")
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] % 2:
        shape = tuple(cos_sin_cache.shape)
        raise ValueError(f"cos_sin_cache must have shape [P, R] with R even, got {shape}")
    if cos_sin_cache.shape[1] > head_dim:
        rotated = cos_sin_cache.shape[1]
        raise ValueError(f"cos_sin_cache has {rotated} columns, more than head_dim {head_dim}")
    if cos_sin_cache.dtype not in (q.dtype, torch.float32):
        wanted = f"{q.dtype} or torch.float32"
        raise ValueError(f"cos_sin_cache must be {wanted}, got {cos_sin_cache.dtype}")
    if not cos_sin_cache.is_contiguous():
        raise ValueError("cos_sin_cache must be contiguous")
    for name, tensor in (("positions", positions), ("cos_sin_cache", cos_sin_cache)):
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on {q.device}, got {tensor.device}")


def _as_heads(name: str, x: Tensor, positions: Tensor, q: Tensor, head_dim: int) -> Tensor:
    """View q or k as [T, H, D] without a copy."""
    if x.dim() not in (2, 3) or x.shape[0] != positions.shape[0] or x.shape[-1] % head_dim:
        expected = f"[{positions.shape[0]}, heads, {head_dim}]"
        raise ValueError(f"{name} must have shape {expected}, flat or not, got {tuple(x.shape)}")
    if x.dim() == 3 and x.shape[2] != head_dim:
        raise ValueError(f"{name} must have {head_dim} columns a head, got {x.shape[2]}")
    if x.dtype is not q.dtype:
        raise ValueError(f"{name} must be {q.dtype}, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on {q.device}, got {x.device}")
    if x.stride(-1) != 1:
        raise ValueError(f"{name} must have its columns next to each other")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"rope is forward only: call it under torch.no_grad() ({name})")
    if x.dim() == 3:
        return x
    return x.view(x.shape[0], x.shape[1] // head_dim, head_dim)
