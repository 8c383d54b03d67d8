"""The regime of `taut::w4a16_gemm` where one tile would leave much of a last wave empty: two tiles.

Maths     as :mod:`taut_kernels.gemm.w4a16`
Numerics  as :mod:`taut_kernels.gemm.w4a16_wgmma`; which tile computes an output feature follows
          from M and N alone
Limits    as the kernels of its tiles

Two launches, the tail's right behind the head's: its programs take places as the head's end. Where
launches start early the tail does not wait for the head at its start but at its end. It reads
nothing the head writes; what both read is there, since the head lets the tail go only after it
has itself waited for the kernel in front; and whoever waits for the tail so waits for both.
"""

from __future__ import annotations

import torch

from taut_kernels import _launch
from taut_kernels.gemm import w4a16_wgmma, w4a16_wgmma_ring
from taut_kernels.gemm.w4a16_wgmma import Role, reorder
from taut_kernels.tiles_wgmma import WgmmaTile
from taut_kernels.tiles_wgmma_ring import WgmmaRingTile
from taut_kernels.tiles_wgmma_waves import WavesTile


def launch(
    tile: WavesTile,
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor,
    group_size: int,
) -> torch.Tensor:
    """Run both kernels; what the op does after the look-up, and what tuning calls.

    Args:
        tile: how to cut the work.
        x: [M, K], M ≥ 1, rows 16-byte aligned.
        qweight: as in the contract of :mod:`taut_kernels.gemm.w4a16`.
        scales: likewise.
        zeros: likewise.
        bias: likewise.
        arrivals: likewise.
        group_size: G.

    Returns:
        [M, N].

    Raises:
        ValueError: as the launchers of the tiles.
    """
    M, N = x.shape[0], 16 * qweight.shape[0]
    y = _launch.empty((M, N), dtype=x.dtype, device=x.device)
    x = reorder(x)
    rows = tile.head_rows(M, N)

    def part(cut: WgmmaTile | WgmmaRingTile, first: int, end: int, role: Role) -> None:
        tiles = slice(first // 16, end // 16)
        operands = (
            x,
            qweight[tiles],
            scales[tiles],
            None if zeros is None else zeros[tiles],
            None if bias is None else bias[first:end],
            arrivals,
            group_size,
            y[:, first:end],
            role,
        )
        if isinstance(cut, WgmmaRingTile):
            w4a16_wgmma_ring.product(cut, *operands)
        else:
            w4a16_wgmma.product(cut, *operands)

    part(tile.head, 0, rows, "head")
    if rows < N:
        part(tile.tail, rows, N, "tail")
    return y
