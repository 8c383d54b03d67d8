"""Tiles of 8-bit products for a shape nobody measured, as the measured tables suggest."""

from __future__ import annotations

from dataclasses import replace

from taut_kernels.gemm.scaled_mm.tile import (
    BLOCK_GROUP,
    BLOCKS,
    MULTIPROCESSORS,
    PAIRS,
    ScaledMmTile,
    tiles_of_blocks,
    why_not_for,
)

RULE_TOKENS = (16, 32, 64, 128)
TMA_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_RULE_SHARED_BYTES = 160 * 1024
"""For a ring: what a multiprocessor of sm_80 has, less what the driver keeps."""
FED_BY_TMA = (
    ScaledMmTile("hopper", 128, 256, 128, 4, 4, group_m=8),
    ScaledMmTile("hopper", 128, 128, 128, 4, 6, group_m=8),
    ScaledMmTile("turns", 128, 128, 128, 4, 6, group_m=8),
    ScaledMmTile("turns", 64, 256, 128, 4, 5, group_m=16),
    ScaledMmTile("hopper", 128, 160, 128, 4, 5, group_m=8),
    ScaledMmTile("hopper", 128, 192, 128, 4, 5, group_m=8),
    ScaledMmTile("turns", 64, 160, 128, 4, 6, group_m=16),
    ScaledMmTile("turns", 64, 192, 128, 4, 6, group_m=16),
)
"""Of equal promise the first. ``turns`` of 128 × 160 loses to ``hopper`` on most shapes. Groups are
of 1024 tokens: on an H100 ``turns`` of 128 × 128 takes up to a third longer in groups of 2048."""
_MANY_TOKENS = 2048
"""Beyond which groups of 512 tokens are faster on an H100, and no slower on an H200."""
LONG_K = 8192
"""From which on tiles fed by TMA beat FP8's rings of 64 × 128 up to 256 tokens; int8's always."""
_SPLIT_PROGRAMS = 88
"""Of ``pairs``: programs beyond which another along K costs more than it brings (H100)."""
_SHORT_WAVE = 0.55
"""A wave of kernel ``blocks`` with 128 tokens a tile beside one with 256 (H100, 2026-11-25)."""
_BESIDE_US = 3.0
"""What each wave but the last costs beside its products where groups do not take turns."""


def waves_us(tile: ScaledMmTile, N: int, K: int, M: int) -> float:
    """Estimate a call of a kernel that TMA feeds, without its start and its last stores.

    Whole waves of tiles, each as long as its products (128 × 128 × 128 take 0.356 µs on an H200) or
    its bytes (64 a clock from L2) take, whichever is longer.

    Args:
        tile: ``kernel`` hopper or turns.
        N: output features.
        K: input features.
        M: tokens.
    """
    tiles = -(-M // tile.block_m) * -(-N // tile.block_n)
    products = 0.356 * tile.block_m * tile.block_n / 128**2
    loads = (tile.block_m + tile.block_n) * 128 / 112e3
    return -(-tiles // MULTIPROCESSORS) * -(-K // 128) * max(products, loads)


def rule(op: str, N: int, K: int, M: int, *, tma: bool = False) -> ScaledMmTile:
    """Choose a tile for a shape nobody measured, as the measured tables suggest.

    Args:
        op: one of :data:`.tile.OPS`.
        N: output features.
        K: input features.
        M: tokens, ≥ 1.
        tma: the card runs the kernels that TMA feeds.

    Returns:
        The tile.
    """
    fed = tma and N % 8 == 0
    if op == "fp8_block":
        return _rule_of_blocks(N, K, M, fed)
    if M <= 64:
        return _rule_of_few_pairs(N, M) if fed else _rule_of_few(N, K, M)
    narrow = -(-N // 64) <= MULTIPROCESSORS
    if M <= 128 and narrow:
        if K >= 2 * N and -(-N // 64) * 2 <= MULTIPROCESSORS:
            return ScaledMmTile("ring", 128, 64, 128, 4, 6, 2)
        return ScaledMmTile("ring", 64, 64, 128, 4, 6)
    if M <= 512 and -(-N // 64) * -(-M // 64) <= MULTIPROCESSORS:
        return ScaledMmTile("ring", 64, 64, 128, 4, 6)
    short = K < LONG_K and op == "fp8_gemm"
    if M <= 256 and (short or not fed) and -(-N // 128) * -(-M // 64) <= MULTIPROCESSORS:
        return ScaledMmTile("ring", 64, 128, 128, 8, 5)
    if fed:
        return rule_of_waves(op, N, K, M)
    return ScaledMmTile("ring", 128, 128, 128, 8, 4)


def _rule_of_blocks(N: int, K: int, M: int, fed: bool) -> ScaledMmTile:
    """Choose a tile of block-wise FP8; of a ring with K split while two programs have room."""
    if fed and M <= BLOCK_GROUP and (tile := _rule_of_few_blocks(N, K, M)):
        return tile
    if fed and M >= 64:
        return _rule_of_many_blocks(N, M)
    block_m = next((tokens for tokens in RULE_TOKENS if tokens >= M), 128)
    block_n, num_warps = (128, 8) if block_m == 128 else (64, 4)
    split, most = 1, 8 if block_m <= 64 else 1  # the last program adds its tiles in registers
    while block_m >= M and split < most and -(-N // block_n) * split <= MULTIPROCESSORS:
        if 4 * BLOCK_GROUP * split > K:
            break
        split *= 2
    return ScaledMmTile("ring", block_m, block_n, BLOCK_GROUP, num_warps, 4, split)


def _rule_of_few_blocks(N: int, K: int, M: int) -> ScaledMmTile | None:
    """Choose kernel ``pairs`` up to 64 tokens; beyond it or ``blocks`` of 64 tokens, or None.

    As measured on Llama-3-8B's products, on an H200 where ``pairs`` fit one wave, else on an H100
    (2026-11-26).
    """
    narrow, wide = -(-N // 64), -(-N // BLOCK_GROUP)
    halves, long = 2 * narrow <= MULTIPROCESSORS, K >= LONG_K
    if M <= 64 and narrow <= MULTIPROCESSORS:
        block_m = next(tokens for tokens in RULE_TOKENS if tokens >= M)
        split = 2 if halves and (M > 32 or (M > 16 and long)) else 1
        stages = 8 if halves and split == 1 else 6
        return ScaledMmTile(PAIRS, block_m, 64, 256, 4, stages, split)
    if M <= 64:
        tile = _rule_of_few_pairs(N, M)
        able = why_not_for(tile, "fp8_block", N) is None
        return tile if able else replace(tile, block_n=64, num_stages=3)
    if halves and not long:
        return ScaledMmTile(PAIRS, 64, 64, 256, 4, 6)
    tiles = wide * -(-M // 64)
    if tiles <= MULTIPROCESSORS:
        whole = ScaledMmTile(BLOCKS, 64, 128, BLOCK_GROUP, 4, 8, group_m=8)
        shared = replace(whole, split_k=2)
        fits = 2 * tiles <= MULTIPROCESSORS and why_not_for(shared, "fp8_block", N) is None
        return shared if fits else whole
    return None


def _rule_of_many_blocks(N: int, M: int) -> ScaledMmTile:
    """Choose a tile of ``blocks`` with two groups: most programs of one wave, or shortest waves.

    A wave of 128 tokens a tile takes more than half as long as one of 256 (:data:`_SHORT_WAVE`).
    """

    def tiles(tile: ScaledMmTile) -> int:
        return -(-N // tile.block_n) * -(-M // tile.block_m)

    def time(tile: ScaledMmTile) -> float:
        waves = -(-tiles(tile) // MULTIPROCESSORS)
        return waves * (_SHORT_WAVE if tile.block_m == BLOCK_GROUP else 1.0)

    shared = [tile for tile in tiles_of_blocks() if tile.block_m >= BLOCK_GROUP]
    at_once = [tile for tile in shared if tiles(tile) <= MULTIPROCESSORS]
    if at_once:
        return max(at_once, key=tiles)
    return min((tile for tile in shared if tile.block_n == BLOCK_GROUP), key=time)


def _rule_of_few_pairs(N: int, M: int) -> ScaledMmTile:
    """Choose a tile of ``pairs`` for at most 64 tokens: one wave of 64 features, or of 128.

    With more features short rings, several of which a multiprocessor holds. As measured on 20
    products on an H100 (2026-11-26), where it is the best tile tried, or within 2 % of it, in 158
    of 160 cells.
    """
    block_m = next(tokens for tokens in RULE_TOKENS if tokens >= M)
    narrow, wide = -(-N // 64), -(-N // 128)
    if narrow <= MULTIPROCESSORS:
        split = max(1, min(4, _SPLIT_PROGRAMS // narrow))
        deep = split == 1 and block_m <= 32 and 2 * narrow <= MULTIPROCESSORS
        stages = 8 if deep else 6
        return ScaledMmTile(PAIRS, block_m, 64, 256, 4, stages, split)
    if wide <= MULTIPROCESSORS:
        return ScaledMmTile(PAIRS, block_m, 128, 256, 4, 4)
    return ScaledMmTile(PAIRS, block_m, 64, 256, 4, 3 if block_m == 64 else 4)


def _rule_of_few(N: int, K: int, M: int) -> ScaledMmTile:
    """Choose a ring for at most 64 tokens: deep where a multiprocessor holds one program.

    Where two tiles of half the tokens fill a wave and K is short, these; else K is split as far as
    every program still has a multiprocessor of its own.
    """
    block_m = next(tokens for tokens in RULE_TOKENS if tokens >= M)
    fill = 2 * -(-N // 64) / MULTIPROCESSORS
    if M > 16 and 2 / 3 < fill <= 1 and K < LONG_K:
        return ScaledMmTile("ring", block_m // 2, 64, 256, 4, 6)
    if -(-N // 64) > MULTIPROCESSORS:
        held = -(-N // 128 // MULTIPROCESSORS)
        stage = (block_m + 128) * 128
        stages = max(3, min(8 if held == 1 else 4, _RULE_SHARED_BYTES // held // stage))
        return ScaledMmTile("ring", block_m, 128, 128, 4 if block_m == 16 else 8, stages)
    block_k, stages = (128, 8) if block_m == 64 else (256, 6)
    split = 1
    while 2 * split * -(-N // 64) <= MULTIPROCESSORS and 4 * block_k * split <= K and split < 8:
        split *= 2
    return ScaledMmTile("ring", block_m, 64, block_k, 4, stages, split)


def promised_us(tile: ScaledMmTile, N: int, K: int, M: int) -> float:
    """Estimate a call as :func:`waves_us` does, and what lies between its waves.

    Args:
        tile: ``kernel`` hopper or turns.
        N: output features.
        K: input features.
        M: tokens.
    """
    waves = -(-(-(-M // tile.block_m) * -(-N // tile.block_n)) // MULTIPROCESSORS)
    beside = _BESIDE_US * (waves - 1) if tile.kernel == "hopper" else 0.0
    return waves_us(tile, N, K, M) + beside


def rule_of_waves(op: str, N: int, K: int, M: int) -> ScaledMmTile:
    """Choose the kernel and tile fed by TMA whose waves promise to be the shortest.

    Args:
        op: ``fp8_gemm`` or ``w8a8_gemm``.
        N: output features.
        K: input features.
        M: tokens.
    """
    able = (tile for tile in FED_BY_TMA if why_not_for(tile, op, N) is None)
    best = min(able, key=lambda tile: promised_us(tile, N, K, M))
    return replace(best, group_m=best.group_m // 2) if M > _MANY_TOKENS else best
