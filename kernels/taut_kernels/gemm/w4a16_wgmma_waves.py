"""The regime of `taut::w4a16_gemm` where one tile would leave much of a last wave empty: two tiles.

Maths     as :mod:`taut_kernels.gemm.w4a16`
Numerics  as :mod:`taut_kernels.gemm.w4a16_wgmma`; which tile computes an output feature follows
          from M and N alone
Limits    as the kernels of its tiles

Two launches, the tail's right behind the head's: its programs take places as the head's end. Where
launches start early the tail does not wait for the head at its start but at its end. It reads
nothing the head writes; what both read is there, since the head lets the tail go only after it
has itself waited for the kernel in front; and whoever waits for the tail so waits for both.

Tiles fed by TMA know no roles: their tail asks for its first weights and then waits for the head
as for any kernel in front. A head of one wave, whose programs end together, leaves little to gain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from taut_kernels import _launch
from taut_kernels.gemm import w4a16_wgmma, w4a16_wgmma_ring
from taut_kernels.gemm._w4a16_plan import Call, Fills, Weight
from taut_kernels.gemm.w4a16_wgmma import Role, reorder
from taut_kernels.tiles_wgmma import WgmmaTile
from taut_kernels.tiles_wgmma_ring import WgmmaRingTile
from taut_kernels.tiles_wgmma_waves import WavesTile


@dataclass(frozen=True, slots=True)
class _HeadAndTail:
    """A call that is two products.

    Attributes:
        head: of the first ``rows`` output features.
        tail: of the others, if any.
        rows: multiple of 16.
        call: what they were planned for.
        reordered: both take activations in fragment order.
    """

    head: Fills
    tail: Fills | None
    rows: int
    call: Call
    reordered: bool

    def run(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """As of :class:`taut_kernels.gemm._w4a16_plan.Runs`."""
        M, N, rows = self.call.M, self.call.N, self.rows
        y = _launch.empty((M, N), dtype=self.call.dtype, device=self.call.device)
        if self.reordered:
            x = reorder(x)
        self.head(x, weight.rows(0, rows), y[:, :rows])
        if self.tail is not None:
            self.tail(x, weight.rows(rows, N), y[:, rows:])
        return y


def plan(tile: WavesTile, call: Call) -> _HeadAndTail:
    """Prepare a call.

    Args:
        tile: how to cut the work.
        call: what to prepare for.

    Raises:
        ValueError: as the products of the tiles.
    """
    rows = tile.head_rows(call.M, call.N)
    head = _product(tile.head, call, rows, "head")
    tail = _product(tile.tail, call, call.N - rows, "tail") if rows < call.N else None
    return _HeadAndTail(head, tail, rows, call, tile.head.reordered)


def _product(cut: WgmmaTile | WgmmaRingTile, call: Call, rows: int, role: Role) -> Fills:
    if isinstance(cut, WgmmaRingTile):
        return w4a16_wgmma_ring.product(cut, call, rows, role)
    return w4a16_wgmma.product(cut, call, rows, role)
