"""Rotary position embedding with gradients: the rotation into new tensors.

Maths     as :mod:`.op`; the gradient is the rotation by −angle of the gradient
Ops       `taut::rope_train` → q', k'; with ``inverse`` by −angle, which is its backward pass: each
          way is the other's derivative, so that it can be differentiated as often as one likes.
          `taut::rope` (serving) rotates in place and has no gradient.
Shapes    positions [T] int64   q [T, Hq, D], k [T, Hk, D] bf16|fp16|fp32, any strides with columns
          next to each other, or k None   cos_sin_cache [P, R] as q or fp32, as vLLM lays it out
          → q', k' contiguous, as q and k (k' without elements for k None)
Numerics  fp32, one rounding at the store; the bits of `taut::rope`; columns from R on are copied
CPU       the reference, in plain torch, also fp64: the specification
Limits    R even, R ≤ D; positions must lie in 0..P-1 (not checked on a GPU: that would wait for
          it); the table has no gradient; sm_80 and later
Source    RoPE: arXiv:2104.09864, §3.2.2. Cache layout: vLLM `rotary_embedding`. The rest is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.launch.op_registration import register_op
from taut_kernels.rope.op import rope_ref
from taut_kernels.rope.train_kernel import rope_train_kernel
from taut_kernels.rowwise import training_tiles
from taut_kernels.rowwise.tile_options import last_arguments, next_power_of_2
from taut_kernels.rowwise.training_tiles import TrainingTile

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_launcher = launcher.Launcher(rope_train_kernel)
Pair = tuple[Tensor, Tensor]


def rope_train_ref(
    positions: Tensor, q: Tensor, k: Tensor | None, cos_sin_cache: Tensor, neox: bool, inverse: bool
) -> Pair:
    """Rotate in plain torch: the specification, and the op's CPU implementation.

    Args:
        positions: [T] int64.
        q: [T, Hq, D] floating point; fp64 is computed in fp64.
        k: [T, Hk, D] or None.
        cos_sin_cache: [P, R].
        neox: halves (True) or neighbours (False) form pairs.
        inverse: by −angle.

    Returns:
        The rotated q and k; for k None no elements.

    Raises:
        ValueError: a position outside the table.
    """
    rows = cos_sin_cache.shape[0]
    outside = (positions < 0) | (positions >= rows)
    if outside.any():
        found = positions[outside][0].item()
        raise ValueError(f"positions must lie in 0..{rows - 1}, got {found}")
    table = cos_sin_cache
    if inverse:
        half = table.shape[1] // 2
        table = torch.cat((table[:, :half], -table[:, half:]), dim=1)
    new_q = q.clone(memory_format=torch.contiguous_format)
    new_k = None if k is None else k.clone(memory_format=torch.contiguous_format)
    rope_ref(positions, new_q, new_k, table, neox)
    return new_q, q.new_empty((0,)) if new_k is None else new_k


def launch(
    positions: Tensor,
    q: Tensor,
    k: Tensor | None,
    cos_sin_cache: Tensor,
    neox: bool,
    inverse: bool,
    tile: TrainingTile | None = None,
) -> Pair:
    """Run the kernel; what the op does, and what tuning calls; as :func:`rope_train_ref`.

    Args:
        positions: [T] int64.
        q: [T, Hq, D].
        k: [T, Hk, D] or None.
        cos_sin_cache: [P, R].
        neox: as in :func:`rope_train_ref`.
        inverse: likewise.
        tile: how to cut the work; None: by the rule.

    Returns:
        The rotated q and k; for k None no elements.
    """
    q, k = _adjacent(q), None if k is None else _adjacent(k)
    T, num_heads, dim = q.shape
    num_kv_heads = 0 if k is None else k.shape[1]
    new_q = launcher.empty(tuple(q.shape), dtype=q.dtype, device=q.device)
    new_k = q.new_empty((0,))
    if k is not None:
        new_k = launcher.empty(tuple(k.shape), dtype=k.dtype, device=k.device)
    if T == 0 or num_heads + num_kv_heads == 0:
        return new_q, new_k
    if cos_sin_cache.shape[1] == 0:
        new_q.copy_(q)
        if k is not None:
            new_k.copy_(k)
        return new_q, new_k
    tile = tile or training_tiles.rope(num_heads + num_kv_heads, T)
    blocks = -(-num_heads // tile.block) + -(-num_kv_heads // tile.block)
    half = cos_sin_cache.shape[1] // 2
    rest = next_power_of_2(dim - 2 * half) if dim > 2 * half else 0
    widths = (dim, half, next_power_of_2(half), rest)
    constants = (num_heads, num_kv_heads, *widths, neox, inverse, tile.block)
    strides = (*q.stride()[:2], *((0, 0) if k is None else k.stride()[:2]))
    _launcher(
        (q.dtype, cos_sin_cache.dtype, constants, tile.num_warps, tile.registers),
        (T * blocks, 1, 1),
        (q, k, cos_sin_cache, positions, new_q, new_k),
        (T, *strides),
        lambda: (
            last_arguments(rope_train_kernel, constants),
            tile.options() | {"enable_fp_fusion": False},
        ),
        strides,
    )
    return new_q, new_k


def _adjacent(x: Tensor) -> Tensor:
    """Return heads with their columns next to each other: a gradient may come otherwise."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _fake_rope_train(positions: Tensor, q: Tensor, k: Tensor | None, *_: Any) -> Pair:
    return q.new_empty(q.shape), q.new_empty((0,) if k is None else k.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    positions, _, k, cos_sin_cache, neox, inverse = inputs
    ctx.save_for_backward(positions, cos_sin_cache)
    ctx.has_k, ctx.neox, ctx.inverse = k is not None, neox, inverse
    if k is None:
        ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    positions, cos_sin_cache = ctx.saved_tensors
    given = dk if ctx.has_k else None
    turned = (positions, dq, given, cos_sin_cache, ctx.neox, not ctx.inverse)
    new_q, new_k = torch.ops.taut.rope_train(*turned)
    return None, new_q, new_k if ctx.has_k else None, None, None, None


_SCHEMA = (
    "taut::rope_train(Tensor positions, Tensor q, Tensor? k, Tensor cos_sin_cache, bool neox, "
    "bool inverse) -> (Tensor, Tensor)"
)
register_op(_SCHEMA, rope_train_ref, launch, _fake_rope_train)
torch.library.register_autograd("taut::rope_train", _backward, setup_context=_setup)


def rope_train(
    positions: Tensor, q: Tensor, k: Tensor | None, cos_sin_cache: Tensor, *, neox: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Rotate queries and keys into new tensors, differentiable.

    Args:
        positions: [...] int64 in 0..P-1, contiguous.
        q: [..., Hq, D] bf16, fp16 or fp32, on the CPU also fp64; tokens at one stride, columns next
            to each other.
        k: likewise with its own number of heads, or None.
        cos_sin_cache: [P, R] contiguous, dtype of ``q`` or fp32, R even and at most D.
        neox: halves of the first R columns form pairs (True), or neighbours (False).

    Returns:
        The rotated q and k, contiguous; None for k None.

    Raises:
        ValueError: a shape, dtype, device or layout the contract does not allow; names the
            argument.
    """
    queries = _as_heads("q", q, positions, q)
    keys = None if k is None else _as_heads("k", k, positions, q)
    _check_table(positions, q, cos_sin_cache)
    new_q, new_k = torch.ops.taut.rope_train(
        positions.view(-1), queries, keys, cos_sin_cache, neox, False
    )
    return new_q.view(q.shape), None if k is None else new_k.view(k.shape)


def _check_table(positions: Tensor, q: Tensor, cos_sin_cache: Tensor) -> None:
    if positions.dtype is not torch.int64 or not positions.is_contiguous():
        raise ValueError(f"positions must be contiguous torch.int64, got {positions.dtype}")
    shape = tuple(cos_sin_cache.shape)
    if len(shape) != 2 or shape[1] % 2 or shape[1] > q.shape[-1]:
        wanted = f"[P, R] with R even and at most {q.shape[-1]}"
        raise ValueError(f"cos_sin_cache must have shape {wanted}, got {shape}")
    if cos_sin_cache.dtype not in (q.dtype, torch.float32):
        wanted = f"{q.dtype} or torch.float32"
        raise ValueError(f"cos_sin_cache must be {wanted}, got {cos_sin_cache.dtype}")
    if not cos_sin_cache.is_contiguous():
        raise ValueError("cos_sin_cache must be contiguous")
    if torch.is_grad_enabled() and cos_sin_cache.requires_grad:
        raise ValueError("cos_sin_cache requires grad: the table has no gradient")
    for name, tensor in (("positions", positions), ("cos_sin_cache", cos_sin_cache)):
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on {q.device}, got {tensor.device}")


def _as_heads(name: str, x: Tensor, positions: Tensor, q: Tensor) -> Tensor:
    """View q or k as [T, H, D] without a copy."""
    dtypes = (*DTYPES, torch.float64) if x.device.type == "cpu" else DTYPES
    if x.dtype not in dtypes or x.dtype is not q.dtype:
        raise ValueError(f"{name} must be bfloat16, float16 or float32, as q; got {x.dtype}")
    if x.dim() < 3 or x.shape[:-2] != positions.shape or x.shape[-1] != q.shape[-1]:
        wanted = f"[{', '.join(map(str, positions.shape))}, heads, {q.shape[-1]}]"
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on {q.device}, got {x.device}")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name} must have its columns next to each other, got {x.stride()}")
    if x.dim() == 3:
        return x
    try:
        return x.view(-1, *x.shape[-2:])
    except RuntimeError:
        raise ValueError(f"{name} must have its tokens at one stride, got {x.stride()}") from None
