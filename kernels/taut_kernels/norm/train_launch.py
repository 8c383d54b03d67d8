"""Launchers of the norms' training passes: RMSNorm ± residual and LayerNorm share their kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from taut_kernels.launch import launcher as launching
from taut_kernels.norm import ring as norm_ring
from taut_kernels.norm.backward_kernel import column_sums_kernel, norm_backward_kernel
from taut_kernels.norm.backward_long_kernel import norm_columns_kernel, norm_dx_long_kernel
from taut_kernels.norm.train_kernel import norm_kernel, norm_long_kernel
from taut_kernels.rowwise import training_tiles
from taut_kernels.rowwise.tile_options import last_arguments, launch_options, next_power_of_2
from taut_kernels.rowwise.tiles import FusedTile
from taut_kernels.rowwise.training_tiles import RESIDENT_LIMIT, NormRingTile, TrainingTile

_resident = launching.Launcher(norm_kernel)
_long = launching.Launcher(norm_long_kernel)
_backward = launching.Launcher(norm_backward_kernel)
_dx_long = launching.Launcher(norm_dx_long_kernel)
_columns = launching.Launcher(norm_columns_kernel)
_column_sums = launching.Launcher(column_sums_kernel)

Optional = Tensor | None


def forward(
    x: Tensor,
    residual: Optional,
    weight: Optional,
    bias: Optional,
    epsilon: float,
    *,
    centred: bool,
    tile: FusedTile | None = None,
) -> tuple[Tensor, Optional, Optional, Tensor]:
    """Run the forward kernel.

    Args:
        x: [M, N].
        residual: as ``x``, added first and not changed; or None.
        weight: [N] or None.
        bias: [N] or None; LayerNorm only.
        epsilon: added to the variance or mean square.
        centred: LayerNorm; else RMSNorm.
        tile: how to cut the work; None: by the rule.

    Returns:
        y [M, N]; x + residual [M, N] or None; mean [M] fp32 or None; 1/√(…) [M] fp32.
    """
    M, N = x.shape
    y = launching.empty((M, N), dtype=x.dtype, device=x.device)
    total = None
    if residual is not None:
        total = launching.empty((M, N), dtype=x.dtype, device=x.device)
    mean = launching.empty((M,), dtype=torch.float32, device=x.device) if centred else None
    rstd = launching.empty((M,), dtype=torch.float32, device=x.device)
    if M == 0:
        return y, total, mean, rstd
    if tile is None:
        op = "rms_norm" if residual is None else "add_rms_norm"
        op = "layer_norm" if centred else op
        tile = training_tiles.norm_forward(launching.gpu_name(x.device), op, N, M)
    launcher = _resident if N <= RESIDENT_LIMIT else _long
    constants = (N, centred, tile.rows, min(tile.block, max(8, next_power_of_2(N))))
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    launcher(
        (
            *_forms((x, weight, bias)),
            residual is None,
            constants,
            tile.num_warps,
            tile.registers,
        ),
        (-(-M // tile.rows), 1, 1),
        (x, residual, weight, bias, y, total, mean, rstd),
        (M, *strides, epsilon),
        # Serving's tiles may start early; these kernels do not wait.
        lambda: (
            last_arguments(launcher.kernel, constants),
            launch_options(dataclasses.replace(tile, pdl=False)),
        ),
        strides,
    )
    return y, total, mean, rstd


def _adjacent(x: Tensor) -> Tensor:
    """Return a gradient with its columns next to each other: one expanded from a scalar has not."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def backward(
    dy: Tensor,
    added: Optional,
    x: Tensor,
    weight: Optional,
    mean: Optional,
    rstd: Tensor,
    wants: tuple[torch.dtype | None, torch.dtype | None],
    tile: TrainingTile | NormRingTile | None = None,
) -> tuple[Tensor, Optional, Optional]:
    """Run the backward kernels.

    Args:
        dy: [M, N], gradient of the output.
        added: [M, N], added to dx; or None.
        x: [M, N], what was normalised.
        weight: [N] or None.
        mean: [M] fp32 (LayerNorm), or None (RMSNorm).
        rstd: [M] fp32.
        wants: dtypes of the weight's and of the bias's gradients, None for those not wanted.
        tile: how to cut the work in one walk, or the ring that holds rows; None: by the rule.

    Returns:
        dx [M, N], and the two gradients [N].
    """
    M, N = x.shape
    dx = launching.empty((M, N), dtype=x.dtype, device=x.device)
    if M == 0:
        zeros = [
            None if dtype is None else torch.zeros(N, dtype=dtype, device=x.device)
            for dtype in wants
        ]
        return dx, zeros[0], zeros[1]
    dy = _adjacent(dy)
    added = None if added is None else _adjacent(added)
    operands = (x, dy, added, weight, mean, rstd)
    limit = RESIDENT_LIMIT if mean is None else training_tiles.LAYER_NORM_BACKWARD_LIMIT
    tile = tile or norm_ring.choose(operands)
    if isinstance(tile, NormRingTile):
        parts = _backward_ring(tile, operands, dx, wants)
    elif limit < N and tile is None:
        parts = _backward_long(operands, dx, wants)
    else:
        tile = tile or training_tiles.norm_backward(N, M, centred=mean is not None)
        parts = _backward_resident(tile, operands, dx, wants)
    return dx, *column_sums(parts, wants)


Operands = norm_ring.Operands
Wants = tuple[torch.dtype | None, torch.dtype | None]


def _parts(programs: int, x: Tensor, wants: Wants) -> list[Optional]:
    shape = (programs, x.shape[1])
    return [
        None if dtype is None else launching.empty(shape, dtype=torch.float32, device=x.device)
        for dtype in wants
    ]


def _strides(operands: Operands) -> tuple[int, int, int]:
    x, dy, added = operands[:3]
    return x.stride(0), dy.stride(0), 0 if added is None else added.stride(0)


def _forms(operands: Sequence[Optional]) -> tuple[torch.dtype | None, ...]:
    return tuple(None if operand is None else operand.dtype for operand in operands)


def _backward_resident(
    tile: TrainingTile, operands: Operands, dx: Tensor, wants: Wants
) -> list[Optional]:
    (M, N), device = dx.shape, dx.device
    programs = training_tiles.programs(tile, -(-M // tile.rows), device)
    parts = _parts(programs, dx, wants)
    block = min(tile.block, max(8, next_power_of_2(N)))
    constants = (N, tile.rows, block, tile.stages, tile.again)
    strides = _strides(operands)
    absent = tuple(part is None for part in parts)
    _backward(
        (_forms(operands), absent, constants, tile.num_warps, tile.registers),
        (programs, 1, 1),
        (*operands, dx, *parts),
        (M, *strides),
        lambda: (last_arguments(norm_backward_kernel, constants), tile.options()),
        strides,
    )
    return parts


def _backward_ring(
    tile: NormRingTile, operands: Operands, dx: Tensor, wants: Wants
) -> list[Optional]:
    programs = min(launching.multiprocessors(dx.device), dx.shape[0])
    dw, db = _parts(programs, dx, wants)
    norm_ring.launch(tile, programs, operands, (dx, dw, db))
    return [dw, db]


def _backward_long(operands: Operands, dx: Tensor, wants: Wants) -> list[Optional]:
    (M, N), device = dx.shape, dx.device
    strides = _strides(operands)
    rows = training_tiles.NORM_LONG
    _dx_long(
        (_forms(operands), N),
        (M, 1, 1),
        (*operands, dx),
        (M, *strides),
        lambda: (last_arguments(norm_dx_long_kernel, (N, rows.block)), rows.options()),
        strides,
    )
    if wants == (None, None):
        return [None, None]
    tile = training_tiles.NORM_COLUMNS
    blocks, pieces = -(-N // tile.block), -(-M // tile.rows)
    slices = -(-training_tiles.programs(tile, blocks * pieces, device) // blocks)
    parts = _parts(slices, dx, (torch.float32, wants[1]))  # dw comes with db
    x, dy, _, _, mean, rstd = operands
    constants = (N, tile.rows, tile.block)
    _columns(
        (x.dtype, dy.dtype, mean is None, parts[1] is None, constants),
        (blocks, slices, 1),
        (x, dy, mean, rstd, *parts),
        (M, *strides[:2]),
        lambda: (last_arguments(norm_columns_kernel, constants), tile.options()),
        strides[:2],
    )
    return parts


def column_sums(parts: list[Optional], wants: Wants) -> tuple[Optional, Optional]:
    """Add the programs' parts of both gradients in one launch, always in the same order.

    Args:
        parts: [programs, N] fp32 of each gradient, or None.
        wants: dtypes of the gradients, None for one that is not wanted.

    Returns:
        [N] each, or None where there are no parts or none are wanted.
    """
    sums: list[Optional] = [None, None]
    operands: list[Optional] = []
    for i, (part, dtype) in enumerate(zip(parts, wants, strict=True)):
        if part is not None and dtype is not None:
            sums[i] = launching.empty((part.shape[1],), dtype=dtype, device=part.device)
            operands += [part, sums[i]]
    if operands:
        assert operands[0] is not None
        (programs, N), count = operands[0].shape, len(operands) // 2
        operands += [None] * (4 - len(operands))
        tile = training_tiles.COLUMN_SUMS
        constants = (N, tile.rows, tile.block)
        _column_sums(
            (*(None if x is None else x.dtype for x in operands), constants),
            (-(-N // tile.block), count, 1),
            tuple(operands),
            (programs,),
            lambda: (last_arguments(column_sums_kernel, constants), tile.options()),
        )
    return sums[0], sums[1]
