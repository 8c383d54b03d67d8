"""Launcher of the norms' backward pass that holds rows in shared memory, and what it takes.

Maths, shapes and numerics are those of :mod:`.train_launch`; a row's sums are
taken in another order than there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.norm.ring_kernel import norm_backward_ring_kernel
from taut_kernels.rowwise import training_tiles
from taut_kernels.rowwise.tile_options import last_arguments
from taut_kernels.rowwise.training_tiles import NormRingTile

_launcher = launcher.Launcher(norm_backward_ring_kernel)
Optional = Tensor | None
Operands = tuple[Tensor, Tensor, Optional, Optional, Optional, Tensor]
"""x, dy, added, weight, mean, rstd: see `_norm_launch.backward`."""


def why_not_supported(operands: Operands) -> str | None:
    """Say why the ring does not take a call, or None.

    Args:
        operands: of the call.
    """
    x, dy, added, weight, _, _ = operands
    rows = [x, dy] if added is None else [x, dy, added]
    if x.dtype not in (torch.bfloat16, torch.float16) or any(t.dtype != x.dtype for t in rows):
        return f"rows must be of one 16-bit type, got {[str(t.dtype) for t in rows]}"
    bits = x.shape[1] | (0 if weight is None else weight.data_ptr())
    for tensor in rows:
        bits |= tensor.stride(0) | tensor.data_ptr()
    if bits % launcher.ALIGNMENT:
        return "columns and strides must be multiples of 16, addresses 16-byte aligned"
    return launcher.why_no_ring(x.device)


def choose(operands: Operands) -> NormRingTile | None:
    """Choose a tile where the ring takes a call and is the faster; else None.

    Args:
        operands: of the call.
    """
    x, _, added, _, mean, _ = operands
    M, N = x.shape
    if training_tiles.NORM_RING_COLUMNS[0] >= N:
        return None
    rows = M // launcher.multiprocessors(x.device)
    tile = training_tiles.norm_ring(N, rows, centred=mean is not None, added=added is not None)
    return None if tile is None or why_not_supported(operands) else tile


def launch_constants(tile: NormRingTile, operands: Operands) -> tuple[int, int, bool, int]:
    """Return the kernel's constants: N, LATE, HELD, WARPS.

    Args:
        tile: how to cut the work.
        operands: of the call.

    Raises:
        ValueError: two rows do not fit into shared memory.
    """
    x, _, added, weight, _, _ = operands
    N = x.shape[1]
    weight_bytes = 0 if weight is None else weight.element_size()
    if not tile.holds_two_rows(N, 2 if added is None else 3, weight_bytes):
        raise ValueError(f"a ring {tile} does not hold two rows of {N} columns")
    late = min(tile.late, -(-N // (256 * tile.num_warps)))
    return N, late, tile.held, tile.num_warps


def launch_options(tile: NormRingTile) -> dict[str, Any]:
    """Return what the launcher passes to the compiler.

    Args:
        tile: how to cut the work.
    """
    return {"num_warps": tile.num_warps, "enable_fp_fusion": True}


def launch(
    tile: NormRingTile,
    programs: int,
    operands: Operands,
    gradients: tuple[Tensor, Optional, Optional],
) -> None:
    """Compute dx, and the programs' parts of dw and db.

    Args:
        tile: how to cut the work.
        programs: one a multiprocessor, no more than rows.
        operands: that :func:`why_not_supported` has no reason against.
        gradients: dx [M, N] and the parts [programs, N] fp32, written; None where not wanted.

    Raises:
        ValueError: two rows do not fit into shared memory.
    """
    x, dy, added = operands[:3]
    constants = launch_constants(tile, operands)
    strides = (x.stride(0), dy.stride(0), 0 if added is None else added.stride(0))
    pointers = (*operands, *gradients)
    _launcher(
        (tuple(None if one is None else one.dtype for one in pointers), constants),
        (programs, 1, 1),
        pointers,
        (x.shape[0], *strides),
        lambda: (last_arguments(norm_backward_ring_kernel, constants), launch_options(tile)),
        strides,
    )
