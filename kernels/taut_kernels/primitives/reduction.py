"""Reduction as a ladder: sum, maximum or mean along a dimension, or of everything.

Op        `taut::reduce`
Shapes    x of any shape and strides, bf16|fp16|fp32; ``dim`` in −d..d−1, or None for all of it → y
          of x's shape without ``dim`` (or with 1 there: ``keepdim``), a scalar for None;
          contiguous, dtype of x
Rungs     ``v1`` single pass: one program a result · ``v2`` two stages: shares of a result, then
          their join · ``v3`` persistent: as many programs as run at once
          (:mod:`._reduce_jit` says what each should gain; ``kernels/README.md`` what it did)
Layout    x is read as [outer, R, inner] where it lies; where strides forbid that, a copy is
Floor     the bytes of x, read once, at the card's rate
Numerics  fp32 in every stage, one rounding at the end; the order of additions depends on shape,
          rung and card only: the same bits from run to run. A NaN is the maximum. No elements: the
          sum is 0, the mean NaN, the maximum refused
CPU       the reference, in plain torch
Limits    forward only; sm_80 and later; fewer than 2³¹ results
Source    two stages: Harris, "Optimizing Parallel Reduction in CUDA" (2007)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.launch.op_registration import register_op
from taut_kernels.primitives.reduce_kernel import reduce_kernel
from taut_kernels.primitives.reduce_tiles import VERSIONS, ReduceTile, tile_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPERATIONS = ("sum", "max", "mean")
_MOST_RESULTS = 2**31
_LAUNCHER = launcher.Launcher(reduce_kernel)


def reduce_ref(x: Tensor, operation: str, dim: int | None, keepdim: bool) -> Tensor:
    """Reduce in plain torch: the specification, and the op's CPU implementation.

    Args:
        x: floating point; fp64 gives fp64, for gold results.
        operation: one of :data:`OPERATIONS`.
        dim: the dimension, or None for all.
        keepdim: leave it with size 1; a scalar for ``dim`` None in any case.

    Returns:
        The result in the dtype of ``x``.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    flat, axis = (wide.reshape(-1), 0) if dim is None else (wide, dim)
    keep = keepdim and dim is not None
    if operation == "max":
        y = flat.amax(axis, keepdim=keep)
    else:
        y = getattr(flat, operation)(axis, keepdim=keep)
    return y.to(x.dtype).contiguous()


def _as_three(x: Tensor, dim: int | None) -> Tensor:
    """View ``x`` as [outer, R, inner] along its reduced dimension; a copy where strides forbid."""
    if dim is None:
        return x.reshape(1, -1, 1)
    axis = dim % x.dim()
    outer, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    return x.reshape(outer, x.shape[axis], inner)


def result_shape(x: Tensor, dim: int | None, keepdim: bool) -> tuple[int, ...]:
    """Return the shape of a reduction of ``x``."""
    if dim is None:
        return ()
    axis = dim % x.dim()
    kept = (1,) if keepdim else ()
    return (*x.shape[:axis], *kept, *x.shape[axis + 1 :])


def stage(tile: ReduceTile, x: Tensor, y: Tensor, share: int, maximum: bool, factor: float) -> None:
    """Reduce x into y, or into as many parts as there are shares; what :func:`launch` does twice.

    Args:
        tile: how to cut the work.
        x: [outer, R, inner], any strides.
        y: [shares, outer, inner], contiguous, written.
        share: elements of a result a program takes.
        maximum: else the sum.
        factor: of the results.
    """
    outer, R, inner = x.shape
    splits = -(-R // share)
    block_i = min(tile.block_i, 1 << (inner - 1).bit_length())
    items = outer * splits * -(-inner // block_i)
    numbers = (R, inner, share, splits, outer * inner, items, *x.stride(), factor)
    programs = items
    if tile.persistent:
        programs = min(items, tile.per_sm * launcher.multiprocessors(x.device))
    _LAUNCHER(
        (tile, block_i, x.dtype, y.dtype, maximum, numbers),
        (programs, 1, 1),
        (x, y),
        numbers,
        lambda: (
            {
                "MAXIMUM": maximum,
                "PERSISTENT": tile.persistent,
                "STAGES": tile.num_stages,
                "BLOCK_R": tile.block_r,
                "BLOCK_I": block_i,
            },
            {"num_warps": tile.num_warps},
        ),
    )


def launch(tile: ReduceTile, x: Tensor, operation: str, dim: int | None, keepdim: bool) -> Tensor:
    """Run a rung with a given tile; what the op does after the look-up.

    Args:
        tile: how to cut the work.
        x: of any shape.
        operation: one of :data:`OPERATIONS`.
        dim: the dimension, or None for all.
        keepdim: leave it with size 1.

    Returns:
        The result.
    """
    if x.numel() == 0:
        return reduce_ref(x, operation, dim, keepdim)  # nothing to read
    y = launcher.empty(result_shape(x, dim, keepdim), dtype=x.dtype, device=x.device)
    three = _as_three(x, dim)
    outer, R, inner = three.shape
    maximum, factor = operation == "max", 1.0 / R if operation == "mean" else 1.0
    share = tile.share_of(outer, R, inner, launcher.multiprocessors(x.device))
    if share == R:
        stage(tile, three, y, R, maximum, factor)
        return y
    splits = -(-R // share)
    partial = launcher.empty((splits, outer * inner), dtype=torch.float32, device=x.device)
    stage(tile, three, partial, share, maximum, 1.0)
    join = tile_of("v1", inner=outer * inner)
    stage(join, partial[None], y, splits, maximum, factor)
    return y


def _launch_reduce(
    x: Tensor, operation: str, dim: int | None, keepdim: bool, version: str
) -> Tensor:
    inner = 1 if dim is None else math.prod(x.shape[dim % x.dim() + 1 :])
    return launch(tile_of(version, inner=inner), x, operation, dim, keepdim)


def _reduce_cpu(x: Tensor, operation: str, dim: int | None, keepdim: bool, version: str) -> Tensor:
    del version
    y = reduce_ref(x, operation, dim, keepdim)
    return y.clone() if y.data_ptr() == x.data_ptr() else y  # an op's result is no view


def _fake_reduce(x: Tensor, operation: str, dim: int | None, keepdim: bool, version: str) -> Tensor:
    del operation, version
    return x.new_empty(result_shape(x, dim, keepdim))


_SCHEMA = "(Tensor x, str operation, int? dim, bool keepdim, str version) -> Tensor"
register_op(f"taut::reduce{_SCHEMA}", _reduce_cpu, _launch_reduce, _fake_reduce)


def reduce(
    x: Tensor,
    operation: str = "sum",
    dim: int | None = None,
    *,
    keepdim: bool = False,
    version: str = "v3",
) -> Tensor:
    """Reduce along a dimension, or everything.

    Args:
        x: bf16, fp16 or fp32, any shape and strides.
        operation: ``sum``, ``max`` or ``mean``.
        dim: the dimension, or None for all of them.
        keepdim: leave it with size 1; not with ``dim`` None.
        version: the rung, ``v1`` to ``v3``.

    Returns:
        The result in the dtype of ``x``, contiguous.

    Raises:
        ValueError: a shape, dtype or option the contract does not allow; names the argument.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be bfloat16, float16 or float32, got {x.dtype}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("x requires grad: the op is forward only, call it under no_grad()")
    for name, value, known in (
        ("operation", operation, OPERATIONS),
        ("version", version, VERSIONS),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    _check_dim(x, operation, dim, keepdim)
    y: Tensor = torch.ops.taut.reduce(x, operation, dim, keepdim, version)
    return y


def _check_dim(x: Tensor, operation: str, dim: int | None, keepdim: bool) -> None:
    if dim is None and keepdim:
        raise ValueError("keepdim needs dim")
    if dim is not None and not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must lie in {-x.dim()}..{x.dim() - 1}, got {dim}")
    reduced = x.numel() if dim is None else x.shape[dim]
    results = math.prod(result_shape(x, dim, keepdim))
    if operation == "max" and reduced == 0 and results:
        raise ValueError(f"dim {dim} of x has no elements: there is no maximum")
    if results >= _MOST_RESULTS:
        raise ValueError(f"x has too many results: {results} of fewer than {_MOST_RESULTS}")
