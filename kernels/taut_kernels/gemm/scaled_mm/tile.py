"""How the 8-bit products' kernels are cut up: a tile, and which products it can run.

Measured tiles stand in the tables of :mod:`.lookup`.
"""

from __future__ import annotations

from dataclasses import dataclass

OPS = ("w8a8_gemm", "fp8_gemm", "fp8_block")
BLOCKS = "blocks"
"""The kernel for block-wise FP8 alone, and many tokens."""
PAIRS = "pairs"
"""The kernel of few tokens that takes two blocks of K a step."""
STARTS_EARLY = ("ring", PAIRS)
"""Kernels that may start before the one in front has ended."""
PREFETCH = 2
"""Lines of 128 bytes of each row, in every early start that won in a layer."""
KERNELS = ("ring", "hopper", "turns", "few", PAIRS, BLOCKS)
_MOST_STAGES = {
    "hopper": {(128, 128): 16, (128, 256): 16, (128, 160): 5, (128, 192): 5},
    "turns": {(128, 128): 6, (64, 256): 5, (128, 160): 5, (64, 160): 6, (64, 192): 6},
    BLOCKS: {(256, 128): 4, (128, 128): 6, (128, 64): 8, (128, 32): 10, (64, 128): 8},
}
"""By kernel, and tokens and features of a tile: 226 KB hold blocks of results, too."""
FEW_RING_BYTES = 222 * 1024
"""What ``few`` and ``pairs`` leave of 227 KB to their rings."""
BLOCK_GROUP = 128
"""K indices and output features a block-wise FP8 scale covers."""
_BLOCK_STEPS = {"ring": 128, PAIRS: 256, BLOCKS: 128}
"""Of kernels for block-wise FP8: K indices a step, one or two blocks."""
MULTIPROCESSORS = 132
"""Of the cards the rule knows."""


@dataclass(frozen=True, slots=True)
class ScaledMmTile:
    """One way to cut the work.

    Args:
        kernel: ``ring`` (`cp.async` ring, weights as the row operand); ``pairs`` (likewise, two
            blocks of 128 along K a step, sm_90 only); or, with a warp of its own
            for TMA, sm_90 only: ``few`` (weights as the row operand) or, persistent, ``hopper``
            (two groups of warps share a tile) or ``turns`` (each has tiles of its own, and they
            multiply in turn); for block-wise FP8 alone, persistent, ``blocks``.
        block_m: tokens of a tile, a power of two ≥ 16; with ``hopper`` 128, with ``few`` 64 or 128,
            with ``pairs`` 16, 32 or 64, with ``blocks`` 64, 128 or 256.
        block_n: output features of a tile, a power of two ≥ 16; with ``hopper`` 128, 160, 192 or
            256, with ``few`` 64 (one group of warps), 128 or 256 (two), with ``pairs`` 64, 128 or
            256. With ``turns`` tiles are 128×128, 128×160, 64×160, 64×192, or 64×256 (FP8 only);
            with ``blocks`` 256×128, 128×128, 128×64, 128×32 or 64×128.
        block_k: K indices a step, a power of two ≥ 32; 128 where TMA feeds, or 256 with ``few``;
            256 with ``pairs``.
        num_warps: 4, 8 or 16 (1 and 2 leave `wgmma` unused); 4, those of a group, but for ``ring``.
        num_stages: steps in flight, ≥ 1.
        split_k: programs along K, 1..32, ``ring``, ``blocks`` of up to 128 tokens and 64 features
            or more, and ``few`` and ``pairs`` with 64 features, only; only up to
            :func:`most_shared_tokens`.
        group_m: token tiles of a group, ``hopper``, ``turns`` and ``blocks`` only.
        early: start before the kernel in front has ended (programmatic dependent launch), ``ring``
            on sm_90 (not for block-wise FP8) and ``pairs`` only.
        prefetch: lines of 128 bytes of each row asked for until it has, 0 or a power of two.

    Raises:
        ValueError: a field is out of its range.
    """

    kernel: str
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    group_m: int = 1
    early: bool = False
    prefetch: int = 0

    def __str__(self) -> str:
        size = f"{self.block_m}x{self.block_n}x{self.block_k}"
        ring = f"{self.kernel} {size}/{self.num_warps}w/{self.num_stages}s"
        if self.kernel in _MOST_STAGES:
            return f"{ring}/g{self.group_m}" + (f"/k{self.split_k}" if self.split_k > 1 else "")
        return f"{ring}/k{self.split_k}" + (f"/e{self.prefetch}" if self.early else "")

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {KERNELS}, got {self.kernel!r}")
        for field, least in (("block_m", 16), ("block_n", 16), ("block_k", 32)):
            value = getattr(self, field)
            # What TMA feeds has its own list.
            free = field == "block_n" and self.kernel != "ring"
            if value < least or (value & (value - 1) and not free):
                raise ValueError(f"{field} must be a power of two of at least {least}, got {value}")
        if self.num_warps not in (4, 8, 16):
            raise ValueError(f"num_warps must be 4, 8 or 16, got {self.num_warps}")
        for field, limit in (("num_stages", 16), ("split_k", 32), ("group_m", 64)):
            if not 1 <= getattr(self, field) <= limit:
                raise ValueError(f"{field} must lie in 1..{limit}, got {getattr(self, field)}")
        self._check_options_of_one_kernel()

    def _check_options_of_one_kernel(self) -> None:
        if not 0 <= self.prefetch <= 32 or self.prefetch & (self.prefetch - 1):
            raise ValueError(f"prefetch must be 0 or a power of two up to 32, got {self.prefetch}")
        if self.early and self.kernel not in STARTS_EARLY:
            raise ValueError("early needs kernel ring or pairs")
        if self.prefetch and (not self.early or self.block_k % 128):
            raise ValueError("prefetch needs early and block_k of at least 128")
        if self.kernel == "few":
            self._check_few()
        if self.kernel == PAIRS:
            self._check_pairs()
        if self.kernel in _MOST_STAGES:
            self._check_persistent()

    def _check_persistent(self) -> None:
        most = _MOST_STAGES[self.kernel].get((self.block_m, self.block_n))
        if most is None:
            sizes = " or ".join(f"{m}×{n}" for m, n in _MOST_STAGES[self.kernel])
            raise ValueError(f"kernel {self.kernel} needs block_m × block_n {sizes}")
        if (self.block_k, self.num_warps) != (128, 4):
            raise ValueError(f"kernel {self.kernel} needs block_k 128 and num_warps 4")
        if self.split_k > 1 and not most_shared_tokens(self):
            tile = f"{self.block_m}×{self.block_n}"
            raise ValueError(f"kernel {self.kernel} of {tile} needs split_k 1, got {self.split_k}")
        if self.num_stages < 2:
            raise ValueError(f"kernel {self.kernel} needs num_stages of at least 2, got 1")
        if self.num_stages > most:
            size = f"{self.block_m}×{self.block_n}"
            raise ValueError(
                f"kernel {self.kernel} has room for {most} stages of {size}, got {self.num_stages}"
            )

    def _check_few(self) -> None:
        if self.block_m not in (64, 128) or self.block_n not in (64, 128, 256):
            raise ValueError(
                f"kernel few needs block_m 64 or 128 and block_n 64, 128 or 256, "
                f"got {self.block_m}×{self.block_n}"
            )
        if self.block_k not in (128, 256) or (self.num_warps, self.group_m) != (4, 1):
            raise ValueError("kernel few needs block_k 128 or 256, num_warps 4 and group_m 1")
        self._check_ring()

    def _check_pairs(self) -> None:
        if self.block_m > 64 or self.block_n not in (64, 128, 256) or self.block_k != 256:
            size = f"{self.block_m}×{self.block_n}×{self.block_k}"
            raise ValueError(
                "kernel pairs needs block_m of at most 64, block_n 64, 128 or 256 and block_k 256, "
                f"got {size}"
            )
        if (self.num_warps, self.group_m) != (4, 1):
            raise ValueError("kernel pairs needs num_warps 4 and group_m 1")
        self._check_ring()

    def _check_ring(self) -> None:
        if self.split_k > 1 and self.block_n != 64:
            raise ValueError(
                f"kernel {self.kernel} splits K with block_n 64 only, got {self.block_n}"
            )
        if self.num_stages < 2:
            raise ValueError(f"kernel {self.kernel} needs num_stages of at least 2, got 1")
        most = FEW_RING_BYTES // ((self.block_m + self.block_n) * self.block_k)
        if self.num_stages > most:
            size = f"{self.block_m}×{self.block_n}×{self.block_k}"
            raise ValueError(
                f"kernel {self.kernel} has room for {most} stages of {size}, got {self.num_stages}"
            )


def tiles_of_parts() -> list[ScaledMmTile]:
    """Return the tiles whose features are two powers of two: for what leaves a wave half empty."""
    return [
        ScaledMmTile(kernel, block_m, block_n, 128, 4, stages, group_m=16)
        for kernel, sizes in _MOST_STAGES.items()
        for (block_m, block_n), stages in sizes.items()
        if block_n & (block_n - 1)
    ]


def tiles_of_few() -> list[ScaledMmTile]:
    """Return the tiles of kernel ``few``: those that won somewhere."""
    return [
        ScaledMmTile("few", 128, 64, 256, 4, 4, 2),
        ScaledMmTile("few", 128, 64, 256, 4, 4),
        ScaledMmTile("few", 128, 64, 128, 4, 9),
        ScaledMmTile("few", 64, 64, 256, 4, 6),
        ScaledMmTile("few", 128, 128, 128, 4, 6),
        ScaledMmTile("few", 128, 256, 128, 4, 4),
    ]


def tiles_of_blocks() -> list[ScaledMmTile]:
    """Return the tiles of kernel ``blocks``, in groups of several token tiles.

    Those of 64 tokens with all the stages there is room for, and with half of them: then two
    programs share a multiprocessor.
    """
    return [
        ScaledMmTile(BLOCKS, block_m, block_n, BLOCK_GROUP, 4, stages, group_m=group_m)
        for (block_m, block_n), most in _MOST_STAGES[BLOCKS].items()
        for stages in ((most, most // 2) if block_m == 64 else (most,))
        for group_m in ((8, 16) if block_n == BLOCK_GROUP <= block_m else (8,))
    ]


def tiles_of_pairs() -> list[ScaledMmTile]:
    """Return a tile of kernel ``pairs`` for each number of tokens and features it has."""
    narrow = [ScaledMmTile(PAIRS, block_m, 64, 256, 4, 4) for block_m in (16, 32, 64)]
    sizes = ((16, 128), (32, 128), (64, 128), (16, 256), (32, 256), (64, 256))
    return narrow + [ScaledMmTile(PAIRS, *size, 256, 4, 2) for size in sizes]


def most_shared_tokens(tile: ScaledMmTile) -> int:
    """Return the most tokens whose tiles programs may share: what a layer's ``arrivals`` count.

    Those of one tile; with ``blocks``, whose groups of 64 tokens arrive apart, twice the features
    of a tile: there are two counters for 64 features. 0 where a tile's programs share none.
    """
    if tile.kernel not in _MOST_STAGES:
        return tile.block_m
    if tile.kernel != BLOCKS or tile.block_m > BLOCK_GROUP:
        return 0
    return 2 * tile.block_n if 2 * tile.block_n >= tile.block_m else 0


def why_not_for(tile: ScaledMmTile, op: str, N: int) -> str | None:
    """Say why a tile cannot run a product; None where it can.

    Args:
        tile: how to cut the work.
        op: one of :data:`OPS`.
        N: output features.
    """
    if op == "fp8_block" and tile.block_k != _BLOCK_STEPS.get(tile.kernel):
        return (
            f"fp8_block needs kernel ring or blocks, block_k 128, or pairs, block_k 256, got {tile}"
        )
    if op == "fp8_block" and tile.kernel == "ring" and tile.early:
        return f"fp8_block has no early start of kernel ring, got {tile}"
    if op == "fp8_block" and tile.block_n > BLOCK_GROUP:
        return f"fp8_block needs block_n of at most 128, one block of weights, got {tile}"
    if op == "fp8_block" and tile.kernel == PAIRS and tile.block_m * tile.block_n > 64 * 64:
        return f"fp8_block has no room for the sums of {tile}"
    if op != "fp8_block" and tile.kernel == BLOCKS:
        return f"kernel {tile.kernel} is for fp8_block alone, got {op}"
    if tile.kernel == BLOCKS and tile.split_k > 1 and 0 < N % BLOCK_GROUP <= 64:
        return (
            f"kernel {tile.kernel} splits K only where the last tile has over 64 features, got {N}"
        )
    if tile.kernel != "ring" and N % 8:
        return f"kernel {tile.kernel} needs N % 8 == 0 (16-byte rows), got {N}"
    if (tile.kernel, tile.block_n, op) == ("turns", 256, "w8a8_gemm"):
        return "kernel turns has tiles of 256 features for FP8 only"
    return None
