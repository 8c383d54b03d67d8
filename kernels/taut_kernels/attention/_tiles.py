"""How the attention kernels are cut up: one rule by head dimension. Nothing was measured yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """One way to cut the work.

    Args:
        block_m: queries a program or step, a power of two of at least 16.
        block_n: keys a step or program, likewise.
        num_warps: warps a program.
        num_stages: steps whose loads are under way at once.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}/{self.num_warps}w/{self.num_stages}s"

    def options(self) -> dict[str, int]:
        """Return what the compiler is told."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# By the padded head dimension. Chosen so that nothing spills on sm_80 and sm_90
# (`python -m taut_kernels.aot`), not by time.
_FORWARD = {
    64: AttentionTile(128, 64, 8, 3),
    128: AttentionTile(128, 32, 8, 3),
    256: AttentionTile(64, 32, 8, 2),
}
KEY_GRADIENTS = {
    64: AttentionTile(64, 128, 8, 2),
    128: AttentionTile(64, 64, 8, 2),
    256: AttentionTile(32, 32, 8, 1),
}
QUERY_GRADIENTS = {
    64: AttentionTile(128, 64, 8, 2),
    128: AttentionTile(64, 64, 8, 2),
    256: AttentionTile(32, 32, 8, 1),
}
ROW_DELTA_BLOCK = 64
_FORWARD_128_HOPPER = AttentionTile(128, 64, 8, 3)


def forward(padded_dim: int, windowed: bool, hopper: bool) -> AttentionTile:
    """Return the tile of the forward kernel.

    Args:
        padded_dim: 64, 128 or 256.
        windowed: a window's mask needs registers of its own.
        hopper: sm_90, whose products take both operands from shared memory.
    """
    if padded_dim == 128 and hopper and not windowed:
        return _FORWARD_128_HOPPER
    return _FORWARD[padded_dim]
