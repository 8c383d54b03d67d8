"""The kernel of `taut::w4a16_gemm` where one tile would leave much of a last wave empty: two tiles.

Maths     as :mod:`.op`
Numerics  as :mod:`.portable`; which tile computes an output feature follows
          from M and N alone
Limits    as :mod:`.tma`

Two launches, the tail's right behind the head's: its programs take places as the head's end. A tail
asks for its first weights and then waits for the head as for any kernel in front. A head of one
wave, whose programs end together, leaves little to gain.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from taut_kernels.gemm.w4a16 import tma as w4a16_wgmma_tma
from taut_kernels.gemm.w4a16.pair_tile import WavesTile
from taut_kernels.gemm.w4a16.plan import Call, Fills, Weight
from taut_kernels.launch import launcher


@dataclass(frozen=True, slots=True)
class _HeadAndTail:
    """A call that is two products.

    Attributes:
        head: of the first ``rows`` output features.
        tail: of the others, if any.
        rows: multiple of 16.
        call: what they were planned for.
    """

    head: Fills
    tail: Fills | None
    rows: int
    call: Call

    def run(self, x: Tensor, weight: Weight) -> Tensor:
        """As of :class:`.plan.Runs`."""
        M, N, rows = self.call.M, self.call.N, self.rows
        y = launcher.empty((M, N), dtype=self.call.dtype, device=self.call.device)
        self.head(x, weight.rows(0, rows), y[:, :rows])
        if self.tail is not None:
            self.tail(x, weight.rows(rows, N), y[:, rows:])
        return y


def plan(tile: WavesTile, call: Call) -> _HeadAndTail:
    """Prepare a call; arguments as of :func:`.portable.plan`, errors as of the tiles' products."""
    rows = tile.head_rows(call.M, call.N)
    head = w4a16_wgmma_tma.product(tile.head, call, rows)
    rest = call.N - rows
    tail = w4a16_wgmma_tma.product(tile.tail, call, rest) if rest else None
    return _HeadAndTail(head, tail, rows, call)
