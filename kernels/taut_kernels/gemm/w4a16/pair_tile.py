"""Two tiles for one product: one for the programs that fill the card, one for what is left.

Its measured tiles stand in the tables of :mod:`.lookup`; no rule chooses it.
"""

from __future__ import annotations

from dataclasses import dataclass

from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile


@dataclass(frozen=True, slots=True)
class WavesTile:
    """One way to cut the work.

    Args:
        head: of as many output rows as fill every place of the card a whole number of times; K is
            not split.
        tail: of the rows behind them: smaller, or with K split, so that it ends sooner.
        places: programs of the head that run at once.

    Raises:
        ValueError: a tile is not fed by TMA, the head splits K, or there is no place.
    """

    head: WgmmaRingTile
    tail: WgmmaRingTile
    places: int

    def __post_init__(self) -> None:
        if not (self.head.tma and self.tail.tma):
            raise ValueError("head and tail need tma")
        if self.head.split_k > 1:
            raise ValueError(f"split_k of the head must be 1, got {self.head.split_k}")
        if self.places < 1:
            raise ValueError(f"places must be at least 1, got {self.places}")

    def __str__(self) -> str:
        return f"waves/{self.places}[{self.head}][{self.tail}]"

    def head_rows(self, M: int, N: int) -> int:
        """Return how many output rows the head takes; the tail takes the others.

        All of them where no whole wave is full or the tail's tiles do not divide what is left.

        Args:
            M: tokens.
            N: output features.
        """
        blocks = -(-M // self.head.block_m)
        waves = N // self.head.rows * blocks // self.places
        rows = waves * self.places // blocks * self.head.rows
        if rows == 0 or (N - rows) % self.tail.rows:
            return N
        return rows

    def why_not(self, N: int, M: int) -> str | None:
        """As :meth:`.WgmmaRingTile.why_not`, at any number of tokens up to M."""
        block = min(self.head.block_m, self.tail.block_m)
        for tokens in range(block, M + block, block):
            rows = self.head_rows(tokens, N)
            blocks = -(-tokens // self.tail.block_m)
            meetings = (N - rows) // self.tail.rows * blocks if self.tail.split_k > 1 else 0
            if meetings > N // 16:
                return f"split_k: {meetings} tiles meet, arrivals counts {N // 16}"
        return self.head.why_not(N, M)
