"""Launcher of the cross entropy that holds rows on chip, and what it takes.

Maths, shapes and numerics are those of :mod:`.cross_entropy`; exponentials that
fall below 2^-126 are 0. Losses, lse and gradients are the same bits from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.loss import tiles as tiles_loss
from taut_kernels.loss.cross_entropy_ring_kernel import cross_entropy_ring_kernel
from taut_kernels.loss.target import is_long
from taut_kernels.loss.tiles import RingTile

MIN_COLUMNS = 16384
"""Shorter rows fit the registers of the kernel that reads twice."""
_SHORT_COLUMNS = 32768
"""Up to here most of the other kernel's second reads hit L2."""
SOFTMAX_COLUMNS = {
    torch.bfloat16: ((16384, 24576), (32768, 262144)),
    torch.float16: ((16384, 262144),),
}
"""Softmax rows beyond the first and up to the last of each pair are the ring's.

A throw-away sweep on an H200, 8192 rows, 2026-11-22, µs of the ring and of the kernel that holds
rows in registers. bf16: 16384 columns 141.7 and 130.9, 24576 223.3 and 267.7, 32768 286.6 and
261.1, 49152 424.6 and 440.6. fp16: 32768 columns 287.2 and 317.8. The other kernel's tile of 261.1
was timed at 32768 alone and in bf16 alone; in fp16 it takes 67 registers, and 64 let a second
program in.
"""
_launcher = launcher.Launcher(cross_entropy_ring_kernel)


def why_not_supported(
    logits: Tensor, grad: Tensor | None, *, smoothed: bool, softcapped: bool, given: bool
) -> str | None:
    """Say why the ring does not take a call, or None.

    Args:
        logits: [M, V] or [B, T, V].
        grad: contiguous, or None.
        smoothed: with label smoothing.
        softcapped: with a soft cap.
        given: the lse is given.
    """
    if grad is None or given:
        return "one pass reads memory once as it is"
    if smoothed or softcapped:
        return "label smoothing and soft caps are the other kernel's"
    if logits.dtype is not torch.bfloat16 or grad.dtype is not torch.bfloat16:
        return f"rows must be bfloat16, got {logits.dtype}"
    if logits.shape[-1] < MIN_COLUMNS:
        return f"rows of {logits.shape[-1]} columns are too short"
    return _why_not_rows(logits, grad.data_ptr())


def _why_not_rows(rows: Tensor, out_address: int) -> str | None:
    bits = rows.shape[-1] | rows.data_ptr() | out_address
    for stride in rows.stride()[:-1]:
        bits |= stride
    if rows.stride(-1) != 1 or bits % 16:
        return "rows must be contiguous and 16-byte aligned"
    return launcher.why_no_ring(rows.device)


def choose_softmax(x: Tensor) -> RingTile | None:
    """Choose a tile for a softmax of long rows; None where the ring does not take them.

    Args:
        x: [M, N].
    """
    ranges = SOFTMAX_COLUMNS.get(x.dtype, ())
    taken = any(beyond < x.shape[1] <= last for beyond, last in ranges)
    if not taken or _why_not_rows(x, 0):
        return None
    return choose(x)


def choose(logits: Tensor) -> RingTile | None:
    """Choose a tile for rows the ring supports; None where they are too few or too long.

    Args:
        logits: [M, V] or [B, T, V].
    """
    V = logits.shape[-1]
    tile = tiles_loss.ring(launcher.gpu_name(logits.device), V)
    if tile is None:
        return None
    least = _least_rows(tile, V) * max(1, launcher.multiprocessors(logits.device) // tile.parts)
    return tile if logits.numel() // V >= least else None


def _least_rows(tile: RingTile, V: int) -> int:
    """Return the rows a multiprocessor, or those that share rows, has at least.

    The first fills the ring and the last empties it. Measured on an H200: from here on the ring is
    ahead of the kernel that reads twice, which long rows make slow with few rows too.
    """
    if V <= _SHORT_COLUMNS:
        return 12
    return 8 if tile.parts < 4 else 4


def _groups(tile: RingTile, device: torch.device) -> int:
    return max(1, launcher.multiprocessors(device) * tile.per_sm // tile.parts)


def launch_constants(tile: RingTile, V: int, *, batched: bool) -> dict[str, Any]:
    """Return the kernel constants that follow from tile and shape.

    Args:
        tile: how to cut the work.
        V: vocabulary.
        batched: [B, T, V] instead of [M, V].

    Raises:
        ValueError: the ring does not hold a row of so many columns.
    """
    if tile.ahead(V) < 1:
        raise ValueError(f"a ring {tile} does not hold rows of {V} columns")
    return {
        "V": V,
        "BATCHED": batched,
        "PARTS": tile.parts,
        "CHUNKS": tile.chunks(V),
        "LAG": tile.lag,
        "SLOTS": tile.slots,
        "UNITS": tile.units,
        "WARPS": tile.num_warps,
    }


def launch_options(tile: RingTile) -> dict[str, Any]:
    """Return what the launcher passes to the compiler.

    Programs wait for each other: a cooperative launch starts all of them or none.

    Args:
        tile: how to cut the work.
    """
    return tiles_loss.launch_options(tile.num_warps) | {
        "maxnreg": tile.registers,
        "launch_cooperative_grid": tile.parts > 1,
    }


def launch(
    tile: RingTile,
    logits: Tensor,
    target: Tensor,
    scale: Tensor,
    grad: Tensor,
    ignore_index: int,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Compute losses, lse and gradients of rows.

    Args:
        tile: how to cut the work.
        logits: [M, V] or [B, T, V] bf16, that :func:`why_not_supported` has no reason against.
        target: [M] int64, contiguous.
        scale: [M] fp32 factors of the rows' gradients.
        grad: as many elements as ``logits``, contiguous, written; may be ``logits``.
        ignore_index: target of rows that do not count.
        z_loss: λ.

    Returns:
        Losses [M] and lse [M], fp32.

    Raises:
        ValueError: the ring does not hold such a row.
    """
    M = target.numel()
    losses = launcher.empty((M,), dtype=torch.float32, device=logits.device)
    lse = launcher.empty((M,), dtype=torch.float32, device=logits.device)
    _launch_rows(tile, (logits, target, scale, losses, lse, grad), M, ignore_index, z_loss)
    return losses, lse


def launch_softmax(tile: RingTile, x: Tensor) -> Tensor:
    """Compute the softmax of rows: the gradient without a target.

    Args:
        tile: how to cut the work.
        x: [M, N] bf16 or fp16, rows contiguous, addresses and stride multiples of 16 elements.

    Returns:
        [M, N] as ``x``.

    Raises:
        ValueError: the ring does not hold such a row.
    """
    M, N = x.shape
    y = launcher.empty((M, N), dtype=x.dtype, device=x.device)
    _launch_rows(tile, (x, None, None, None, None, y), M, -1, 0.0)
    return y


def _launch_rows(
    tile: RingTile, pointers: tuple[Tensor | None, ...], M: int, ignore_index: int, z_loss: float
) -> None:
    logits, softmax = pointers[0], pointers[1] is None
    assert logits is not None
    V, device = logits.shape[-1], logits.device
    cells = None
    if tile.parts > 1:
        cells = launcher.empty((M, tile.parts), dtype=torch.int64, device=device).zero_()
    batched = logits.dim() == 3
    T = logits.shape[1] if batched else M
    outer = (logits.stride(0), T * V) if batched else (0, 0)
    strides = (outer[0], logits.stride(-2), outer[1], V)
    _launcher(
        (tile, V, batched, softmax, logits.dtype, is_long(ignore_index)),
        (min(_groups(tile, device), M) * tile.parts, 1, 1),
        (*pointers, cells),
        (M, T, *strides, ignore_index, z_loss),
        lambda: (launch_constants(tile, V, batched=batched), launch_options(tile)),
        strides,
    )
