"""`taut::scale_`: multiply a gradient in place by a factor that only the device knows.

Maths     x ← x · factor, rounded once; nothing is read or written where factor is 1
Shapes    x of any shape, contiguous, bf16|fp16|fp32   factor one fp32 element
CPU       plain torch
Limits    forward only
Source    ours; the check of 1 on the device spares the synchronisation a check on the host costs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.launch.op_registration import register_op
from taut_kernels.loss.scale_kernel import scale_kernel
from taut_kernels.loss.tiles import launch_options

BLOCK = 4096
NUM_WARPS = 8
PER_SM = 8
"""Programs a multiprocessor: as many as are resident, so that they start at once."""
_launcher = launcher.Launcher(scale_kernel)


def scale_ref_(x: Tensor, factor: Tensor) -> None:
    """Multiply in place in plain torch: the specification, and the op's CPU implementation.

    Args:
        x: any shape, changed.
        factor: one element.
    """
    x.mul_(factor.to(x.dtype) if x.dtype is torch.float64 else factor.float())


def launch_scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply in place with the kernel.

    Args:
        x: contiguous, changed.
        factor: one fp32 element on the device of ``x``.
    """
    n = x.numel()
    if n:
        programs = min(-(-n // BLOCK), PER_SM * launcher.multiprocessors(x.device))
        _launcher(
            (x.dtype, n % 16 == 0, n == 1, n >= 2**31),
            (programs, 1, 1),
            (x, factor),
            (n,),
            lambda: ({"BLOCK": BLOCK}, launch_options(NUM_WARPS)),
        )


_SCHEMA = "taut::scale_(Tensor(a!) x, Tensor factor) -> ()"
register_op(_SCHEMA, scale_ref_, launch_scale_, lambda x, factor: None)


def scaled(gradients: list[Tensor | None], factor: Tensor) -> list[Tensor | None]:
    """Multiply saved gradients, in place where that is possible, and return them.

    A compiler's stand-ins are multiplied into new ones: to change in the backward graph what the
    forward graph returned breaks its partition, and Inductor can reuse the memory by itself.

    Args:
        gradients: contiguous, or None.
        factor: scalar, the gradient of the loss.
    """
    found: list[Tensor | None] = []
    for gradient in gradients:
        if type(gradient) is Tensor:
            torch.ops.taut.scale_(gradient, factor)
            found.append(gradient)
        else:
            found.append(None if gradient is None else (gradient * factor).to(gradient.dtype))
    return found


def of_projection(ctx: Any, grad_loss: Tensor | None, op: str) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias of a loss over projections, and 11 None.

    Args:
        ctx: of the backward, with ``in_forward``: whether it saved gradients, or the operands of
            the op's backward, whose last ones are its ``options``.
        grad_loss: gradient of the loss.
        op: its name in `torch.ops.taut`.
    """
    wants = list(ctx.needs_input_grad[:3])
    if grad_loss is None or not any(wants):
        return (None,) * 14
    gradients = saved_once(ctx, op)
    if not ctx.in_forward:
        backward = getattr(torch.ops.taut, f"{op}_backward")
        gradients = backward(grad_loss, *gradients, *ctx.options, wants)
    chosen = zip(gradients, wants, strict=True)
    found: list[Tensor | None] = [x if wanted else None for x, wanted in chosen]
    if ctx.in_forward:
        found = scaled(found, grad_loss)
    return *found, *((None,) * 11)


USED_UP = "ran its backward twice: the gradients of the forward pass are used up"


def saved_once(ctx: torch.autograd.function.FunctionCtx, op: str) -> tuple[Tensor, ...]:
    """Return the saved tensors of a backward that scales them in place.

    Args:
        ctx: of the backward.
        op: its name, for the error.

    Raises:
        RuntimeError: a second backward over the same graph.
    """
    try:
        saved: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise RuntimeError(f"taut::{op} {USED_UP}") from None
        raise
    return saved
