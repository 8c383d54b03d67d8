"""Cross entropy over whole rows of logits: reference and launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.loss import cross_entropy_ring
from taut_kernels.loss import tiles as tiles_loss
from taut_kernels.loss.cross_entropy_kernel import cross_entropy_kernel
from taut_kernels.loss.reduction import accumulator
from taut_kernels.loss.target import is_long

_launcher = launcher.Launcher(cross_entropy_kernel)


@dataclass(frozen=True, slots=True)
class Objective:
    """The options of the maths: see the module's docstring.

    Attributes:
        ignore_index: target of rows that do not count.
        label_smoothing: ε.
        z_loss: λ.
        softcap: c, or 0 for none.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0


Rows = Callable[
    [
        Tensor,
        Tensor,
        Objective,
        Tensor | None,
        Tensor | None,
        Tensor | None,
    ],
    tuple[Tensor, Tensor],
]
"""A kernel over whole rows: :func:`cross_entropy_ref` or :func:`launch`."""


def cross_entropy_ref(
    logits: Tensor,
    target: Tensor,
    objective: Objective,
    scale: Tensor | None = None,
    grad: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute rows in plain torch: the specification, and the ops' CPU implementation.

    Args:
        logits: [M, V] or [B, T, V]; fp64 gives fp64.
        target: [M] int64.
        objective: options.
        scale: [M] factors of the rows' gradients; None without ``grad``.
        grad: written, as many elements as ``logits``, which it may be; None for no gradient.
        lse: [M] of an earlier call, or None to compute loss and lse.

    Returns:
        Losses [M] (meaningless where ``lse`` is given) and lse [M], in fp32 or fp64.
    """
    V = logits.shape[-1]
    z = logits.reshape(-1, V).to(accumulator(logits.dtype))
    if objective.softcap:
        z = objective.softcap * torch.tanh(z / objective.softcap)
    counts = target != objective.ignore_index
    inside = (target >= 0) & (target < V)
    index = target.where(inside, 0).unsqueeze(1)
    nan_outside = torch.zeros_like(z[:, 0]).masked_fill(~inside, float("nan"))
    smoothing, z_loss = objective.label_smoothing, objective.z_loss
    losses = nan_outside
    if lse is None:
        lse = z.logsumexp(dim=1)
        losses = lse - (1 - smoothing) * z.gather(1, index).squeeze(1) + z_loss * lse.square()
        if smoothing:
            losses = losses - smoothing * z.mean(dim=1)
        losses = (losses + nan_outside).where(counts, 0.0)
        lse = lse.where(counts, 0.0)
    if grad is not None:
        assert scale is not None
        g = (z - lse.unsqueeze(1)).exp() * (1 + 2 * z_loss * lse).unsqueeze(1) - smoothing / V
        g.scatter_add_(1, index, torch.full_like(g[:, :1], smoothing - 1))
        if objective.softcap:
            g = g * (1 - (z / objective.softcap).square())
        g = (g * (scale + nan_outside).unsqueeze(1)).where(counts.unsqueeze(1), 0.0)
        grad.copy_(g.view(grad.shape))
    return losses, lse


def launch(
    logits: Tensor,
    target: Tensor,
    objective: Objective,
    scale: Tensor | None = None,
    grad: Tensor | None = None,
    lse: Tensor | None = None,
    tile: tiles_loss.LossTile | tiles_loss.RingTile | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute rows with a kernel; arguments and results as :func:`cross_entropy_ref`.

    Long bf16 rows go through the ring (:mod:`.cross_entropy_ring`) where it takes
    them, others through the kernel that reads them twice.

    Args:
        logits: likewise.
        target: likewise, contiguous.
        objective: likewise.
        scale: likewise, fp32.
        grad: likewise, contiguous.
        lse: likewise, fp32.
        tile: how to cut the work; None: by the tables.
    """
    if tile is None:
        tile = _ring_tile(logits, objective, grad, lse)
    if isinstance(tile, tiles_loss.RingTile):
        assert scale is not None
        assert grad is not None
        index, z_loss = objective.ignore_index, objective.z_loss
        return cross_entropy_ring.launch(tile, logits, target, scale, grad, index, z_loss)
    return _launch_blocks(logits, target, objective, scale, grad, lse, tile)


def _ring_tile(
    logits: Tensor, objective: Objective, grad: Tensor | None, lse: Tensor | None
) -> tiles_loss.RingTile | None:
    if cross_entropy_ring.why_not_supported(
        logits,
        grad,
        smoothed=objective.label_smoothing > 0,
        softcapped=objective.softcap > 0,
        given=lse is not None,
    ):
        return None
    return cross_entropy_ring.choose(logits)


def _launch_blocks(
    logits: Tensor,
    target: Tensor,
    objective: Objective,
    scale: Tensor | None,
    grad: Tensor | None,
    lse: Tensor | None,
    tile: tiles_loss.LossTile | None,
) -> tuple[Tensor, Tensor]:
    """Compute rows with the kernel that takes any."""
    M, V = target.numel(), logits.shape[-1]
    given = lse is not None
    device = logits.device
    losses = launcher.empty((M,), dtype=torch.float32, device=device)
    if lse is None:
        lse = launcher.empty((M,), dtype=torch.float32, device=device)
    if M == 0:
        return losses, lse
    strided = logits.stride(-1) != 1 and V > 1
    if tile is None and strided and tiles_loss.SCALAR_LOADS.block < V:
        tile = tiles_loss.SCALAR_LOADS
    tile = tile or tiles_loss.lookup(launcher.gpu_name(device), "cross_entropy", V)
    T = M if logits.dim() == 2 else logits.shape[1]
    batches = (0, 0) if logits.dim() == 2 else (logits.stride(0), T * V)
    strides = (batches[0], logits.stride(-2), batches[1], V)
    smoothed, softcapped = objective.label_smoothing > 0, objective.softcap > 0
    constants = (V, given, smoothed, softcapped, strided, tile.block, tile.stages)
    options = tiles_loss.launch_options(tile.num_warps)
    scalars = (objective.label_smoothing, objective.z_loss, objective.softcap)
    _launcher(
        (
            logits.dtype,
            None if grad is None else grad.dtype,
            constants,
            tile.num_warps,
            is_long(objective.ignore_index),
        ),
        (M, 1, 1),
        (logits, target, scale, losses, lse, grad),
        (T, *strides, logits.stride(-1), objective.ignore_index, *scalars),
        lambda: (_named(constants), options),
        strides,
    )
    return losses, lse


def _named(constants: tuple[Any, ...]) -> dict[str, Any]:
    names = cross_entropy_kernel.arg_names[-len(constants) :]
    return dict(zip(names, constants, strict=True))
