"""Softmax over the last dimension, forward and backward.

Maths     y = e^(x − max x) / Σ e^(x − max x) of each row; dx = y · (dy − Σ y · dy)
Ops       `taut::softmax` → y; `taut::softmax_backward` → dx
Shapes    x [M, N] bf16|fp16|fp32, rows at any stride, columns next to each other
          → y [M, N] as x, contiguous; dy as x with any strides → dx as x, contiguous
Numerics  fp32, one rounding at the store. The backward pass starts from the rounded y, as torch's.
          A row with a NaN, with +∞, or of −∞ alone is NaN, as in torch; no other row sees it. The
          same bits from run to run.
CPU       the references, in plain torch, also fp64: the specification
Limits    1 ≤ N ≤ 262144; differentiable once; sm_80 and later. A row is held in registers up to
          65536 columns (fp32, and backward: 32768; fp32 backward: 16384); a longer one is read
          twice, the second time from L2. Forward in 16 bits, compute capability 9.0, it is held in
          shared memory instead, as are shorter ones where that is faster.
Source    online softmax: arXiv:1805.02867, alg. 3. Blocks and code are ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch import launcher as launching
from taut_kernels.launch.op_registration import register_op
from taut_kernels.loss import cross_entropy_ring
from taut_kernels.loss import softmax_kernel as kernels
from taut_kernels.rowwise import training_tiles
from taut_kernels.rowwise.tile_options import last_arguments, next_power_of_2
from taut_kernels.rowwise.training_arguments import refuse_second_derivative, rows_of
from taut_kernels.rowwise.training_tiles import TrainingTile

_resident = launching.Launcher(kernels.softmax_kernel)
_long = launching.Launcher(kernels.softmax_long_kernel)
_backward_resident = launching.Launcher(kernels.softmax_backward_kernel)
_backward_long = launching.Launcher(kernels.softmax_backward_long_kernel)


def softmax_ref(x: Tensor) -> Tensor:
    """Compute the softmax in plain torch: the specification, and the op's CPU implementation.

    Args:
        x: [M, N] floating point; fp64 gives fp64.

    Returns:
        [M, N] as ``x``.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    exponentials = (wide - wide.amax(dim=1, keepdim=True)).exp()
    return (exponentials / exponentials.sum(dim=1, keepdim=True)).to(x.dtype)


def softmax_backward_ref(dy: Tensor, y: Tensor) -> Tensor:
    """Compute the gradient in plain torch: the specification of `taut::softmax_backward`.

    Args:
        dy: [M, N], gradient of ``y``.
        y: [M, N], the softmax.

    Returns:
        [M, N] as ``y``.
    """
    accumulator = torch.promote_types(y.dtype, torch.float32)
    wide, wide_dy = y.to(accumulator), dy.to(accumulator)
    dx = wide * (wide_dy - (wide * wide_dy).sum(dim=1, keepdim=True))
    return dx.to(y.dtype).contiguous()


def _launch_rows(
    launcher: launching.Launcher,
    tile: TrainingTile,
    last: tuple[int | bool, ...],
    operands: tuple[Tensor, ...],
    result: Tensor,
) -> Tensor:
    M, N = result.shape
    if M == 0:
        return result
    constants = (N, tile.rows, min(tile.block, max(8, next_power_of_2(N))), *last)
    strides = tuple(operand.stride(0) for operand in operands)
    launcher(
        (
            tuple(operand.dtype for operand in operands),
            constants,
            tile.num_warps,
            tile.registers,
        ),
        (-(-M // tile.rows), 1, 1),
        (*operands, result),
        (M, *strides),
        lambda: (last_arguments(launcher.kernel, constants), tile.options()),
        strides,
    )
    return result


def _opaque(tile: TrainingTile, x: Tensor) -> bool:
    """Say whether a row is held in the 16 bits it came in; the interpreter has no assembly."""
    return tile.again and not x.is_cpu and x.element_size() == 2


def launch(x: Tensor, tile: TrainingTile | None = None) -> Tensor:
    """Run the forward kernel; what the op does, and what tuning calls.

    Args:
        x: [M, N].
        tile: how to cut the work; None: by the rule. ``stages`` beyond 1 reads rows twice.

    Returns:
        [M, N] as ``x``.
    """
    M, N = x.shape
    ring = cross_entropy_ring.choose_softmax(x) if tile is None else None
    if ring is not None:
        return cross_entropy_ring.launch_softmax(ring, x)
    tile = tile or training_tiles.softmax(N, M, x.element_size())
    y = launching.empty((M, N), dtype=x.dtype, device=x.device)
    if tile.stages == 1 and training_tiles.softmax_limit(x.element_size()) >= N:
        return _launch_rows(_resident, tile, (tile.again, _opaque(tile, x)), (x,), y)
    return _launch_rows(_long, tile, (tile.stages, tile.keep), (x,), y)


def launch_backward(dy: Tensor, y: Tensor, tile: TrainingTile | None = None) -> Tensor:
    """Run the backward kernel; what the op does, and what tuning calls.

    Args:
        dy: [M, N].
        y: [M, N].
        tile: as for :func:`launch`.

    Returns:
        [M, N] as ``y``.
    """
    M, N = y.shape
    # A gradient expanded from a scalar has no columns next to each other.
    dy = dy if dy.stride(1) == 1 or N == 1 else dy.contiguous()
    tile = tile or training_tiles.softmax_backward(N, M, y.element_size())
    dx = launching.empty((M, N), dtype=y.dtype, device=y.device)
    if tile.stages == 1 and training_tiles.softmax_limit(y.element_size()) >= 2 * N:
        return _launch_rows(_backward_resident, tile, (_opaque(tile, y),), (dy, y), dx)
    return _launch_rows(_backward_long, tile, (tile.stages, tile.keep), (dy, y), dx)


def _fake_softmax(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fake_softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    return y.new_empty(y.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del inputs
    ctx.save_for_backward(output)


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    dx: Tensor = torch.ops.taut.softmax_backward(dy, y)
    return dx


def _no_second_derivative(ctx: Any, *_: Tensor) -> None:
    refuse_second_derivative("softmax")


register_op("taut::softmax(Tensor x) -> Tensor", softmax_ref, launch, _fake_softmax)
torch.library.register_autograd("taut::softmax", _backward, setup_context=_setup)

_SOFTMAX_BACKWARD = "taut::softmax_backward(Tensor dy, Tensor y) -> Tensor"
register_op(_SOFTMAX_BACKWARD, softmax_backward_ref, launch_backward, _fake_softmax_backward)
torch.library.register_autograd("taut::softmax_backward", _no_second_derivative)


def softmax(x: Tensor) -> Tensor:
    """Compute the softmax over the last dimension, differentiable.

    Args:
        x: [..., N] bf16, fp16 or fp32, on the CPU also fp64; rows at one stride, columns next to
            each other.

    Returns:
        [..., N] contiguous, dtype of ``x``.

    Raises:
        ValueError: a shape, dtype or layout the contract does not allow; names the argument.
    """
    y: Tensor = torch.ops.taut.softmax(rows_of("x", x))
    return y.view(x.shape)
