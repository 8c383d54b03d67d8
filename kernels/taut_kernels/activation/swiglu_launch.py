"""SiLU and the gated activations with gradients: references and launchers."""

from __future__ import annotations

import torch
from torch import Tensor

from taut_kernels.activation import silu_mul, silu_mul_launch
from taut_kernels.activation.swiglu_kernel import swiglu_backward_kernel, swiglu_kernel
from taut_kernels.launch import launcher
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.rowwise import training_tiles
from taut_kernels.rowwise.tile_options import last_arguments, next_power_of_2
from taut_kernels.rowwise.training_tiles import TrainingTile

_forward_launcher = launcher.Launcher(swiglu_kernel)
_backward_launcher = launcher.Launcher(swiglu_backward_kernel)
Form = tuple[float, float, float | None]
"""α, β and the limit."""
_PLAIN: Form = (1.0, 0.0, None)


def silu_ref(x: Tensor) -> Tensor:
    """Apply SiLU in plain torch: the specification, and the op's CPU implementation."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid(wide)).to(x.dtype).contiguous()


def silu_backward_ref(dy: Tensor, x: Tensor) -> Tensor:
    """Compute the gradient of SiLU in plain torch: the specification of `taut::silu_backward`."""
    return swiglu_backward_ref(dy, x, torch.ones_like(x), *_PLAIN)[0]


def swiglu_ref(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float | None) -> Tensor:
    """Activate in plain torch: the specification, and the op's CPU implementation.

    Args:
        gate: [M, N] floating point; fp64 gives fp64 without roundings.
        up: as ``gate``.
        alpha: factor inside the sigmoid.
        beta: added to the ups.
        limit: clamp of gates (above) and ups (both sides), or None.

    Returns:
        [M, N] as ``gate``.
    """
    return silu_mul.silu_mul_ref(torch.cat((gate, up), dim=1), alpha, beta, limit, False)


def swiglu_backward_ref(
    dy: Tensor, gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float | None
) -> tuple[Tensor, Tensor]:
    """Compute the gradients in plain torch: the specification of `taut::swiglu_backward`.

    Args:
        dy: [M, N], gradient of the output.
        gate: as for :func:`swiglu_ref`.
        up: likewise.
        alpha: likewise.
        beta: likewise.
        limit: likewise.

    Returns:
        Gradients of gate and up [M, N], as they.
    """
    accumulator = torch.promote_types(gate.dtype, torch.float32)
    wide, g, u = (x.to(accumulator) for x in (dy, gate, up))
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    sigmoid = torch.sigmoid(alpha * g)
    d_gate = wide * (u + beta) * sigmoid * (1 + alpha * g * (1 - sigmoid))
    d_up = wide * g * sigmoid
    if limit is not None:
        d_gate = d_gate.where(gate <= limit, 0.0)
        d_up = d_up.where(up.abs() <= limit, 0.0)
    return d_gate.to(gate.dtype).contiguous(), d_up.to(up.dtype).contiguous()


def halves(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """View gates and ups of a packed tensor [M, 2N], each [M, N]."""
    N = x.shape[1] // 2
    return (x[:, ::2], x[:, 1::2]) if interleaved else (x[:, :N], x[:, N:])


def swiglu_packed_backward_ref(
    dy: Tensor, x: Tensor, alpha: float, beta: float, limit: float | None, interleaved: bool
) -> Tensor:
    """Compute the gradient in plain torch: the specification of `taut::swiglu_packed_backward`."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    gradients = swiglu_backward_ref(dy, *halves(x, interleaved), alpha, beta, limit)
    for half, gradient in zip(halves(dx, interleaved), gradients, strict=True):
        half.copy_(gradient)
    return dx


def _form(alpha: float, beta: float, limit: float | None) -> str:
    if limit is not None:
        return "clamped"
    return "silu" if (alpha, beta) == (1.0, 0.0) else "free"


def _tile(N: int, M: int, tile: TrainingTile | None) -> TrainingTile:
    return tile or training_tiles.swiglu(N, M)


def _grid(tile: TrainingTile, block: int, M: int, N: int) -> tuple[int, int, int]:
    return (-(-M // tile.rows) * -(-N // block), 1, 1)


def launch(
    gate: Tensor,
    up: Tensor | None,
    alpha: float,
    beta: float,
    limit: float | None,
    tile: TrainingTile | None = None,
) -> Tensor:
    """Run the forward kernel; what the ops do, and what tuning calls.

    Args:
        gate: [M, N], columns next to each other.
        up: likewise, or None for SiLU alone.
        alpha: as for :func:`swiglu_ref`.
        beta: likewise.
        limit: likewise.
        tile: how to cut the work; None: by the rule.

    Returns:
        [M, N] as ``gate``.
    """
    M, N = gate.shape
    y = launcher.empty((M, N), dtype=gate.dtype, device=gate.device)
    if M == 0:
        return y
    tile = _tile(N, M, tile)
    block = min(tile.block, max(8, next_power_of_2(N)))
    constants = (N, _form(alpha, beta, limit), tile.rows, block)
    strides = (gate.stride(0), 0 if up is None else up.stride(0))
    _forward_launcher(
        (gate.dtype, up is None, constants, tile.num_warps, tile.registers),
        _grid(tile, block, M, N),
        (gate, up, y),
        (M, *strides, alpha, beta, limit or 0.0),
        # Without contraction y has the bits of serving's op.
        lambda: (
            last_arguments(swiglu_kernel, constants),
            tile.options() | {"enable_fp_fusion": False},
        ),
        strides,
    )
    return y


def launch_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    d_gate: Tensor,
    d_up: Tensor | None,
    form: Form,
    *,
    interleaved: bool = False,
    tile: TrainingTile | None = None,
) -> None:
    """Run the backward kernel; what the ops do, and what tuning calls.

    Args:
        dy: [M, N].
        gate: [M, N], columns next to each other; [M, 2N] gates and ups where ``interleaved``.
        up: as ``gate``; None for SiLU alone, or where ``interleaved``.
        d_gate: as ``gate``, written.
        d_up: as ``up``, written.
        form: α, β and the limit.
        interleaved: gates and ups alternate in ``gate``.
        tile: how to cut the work; None: by the rule.
    """
    M, N = dy.shape
    if M == 0:
        return
    # A gradient expanded from a scalar has no columns next to each other.
    dy = dy if dy.stride(1) == 1 or N == 1 else dy.contiguous()
    tile = _tile(N, M, tile)
    block = min(tile.block, max(8, next_power_of_2(N)))
    constants = (N, _form(*form), interleaved, tile.rows, block)
    operands = (dy, gate, up, d_gate, d_up)
    strides = tuple(0 if operand is None else operand.stride(0) for operand in operands)
    _backward_launcher(
        (dy.dtype, gate.dtype, up is None, constants, tile.num_warps, tile.registers),
        _grid(tile, block, M, N),
        operands,
        (M, *strides, form[0], form[1], form[2] or 0.0),
        lambda: (last_arguments(swiglu_backward_kernel, constants), tile.options()),
        strides,
    )


def launch_silu(x: Tensor) -> Tensor:
    """Run `taut::silu`."""
    return launch(x, None, *_PLAIN)


def launch_silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Run `taut::silu_backward`."""
    dx = launcher.empty(tuple(x.shape), dtype=x.dtype, device=x.device)
    launch_backward(dy, x, None, dx, None, _PLAIN)
    return dx


def launch_swiglu_backward(
    dy: Tensor, gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float | None
) -> tuple[Tensor, Tensor]:
    """Run `taut::swiglu_backward`; arguments as :func:`swiglu_backward_ref`."""
    shape = tuple(gate.shape)
    d_gate, d_up = (launcher.empty(shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    launch_backward(dy, gate, up, d_gate, d_up, (alpha, beta, limit))
    return d_gate, d_up


def launch_packed(
    x: Tensor, alpha: float, beta: float, limit: float | None, interleaved: bool
) -> Tensor:
    """Run `taut::swiglu_packed`: serving's kernel and its measured tiles."""
    M, N = x.shape[0], x.shape[1] // 2
    y = launcher.empty((M, N), dtype=x.dtype, device=x.device)
    cut = tiles_fused.lookup(launcher.gpu_name(x.device), "silu_mul", N, M)
    silu_mul_launch.launch(cut, "same", x, alpha, beta, limit, interleaved, y, None)
    return y


def launch_swiglu_packed_backward(
    dy: Tensor, x: Tensor, alpha: float, beta: float, limit: float | None, interleaved: bool
) -> Tensor:
    """Run `taut::swiglu_packed_backward`."""
    dx = launcher.empty(tuple(x.shape), dtype=x.dtype, device=x.device)
    form = (alpha, beta, limit)
    if interleaved:
        launch_backward(dy, x, None, dx, None, form, interleaved=True)
    else:
        (gate, up), (d_gate, d_up) = halves(x, False), halves(dx, False)
        launch_backward(dy, gate, up, d_gate, d_up, form)
    return dx
