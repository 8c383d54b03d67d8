"""Calls of `taut::w4a16_gemm`: every measured tile, what the rules choose, every weight format.

K is a constant of the kernels, so that the shapes of a model not named in a table compile when it
is loaded; these calls stand for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from taut_bench.instruments.recorder import BOTH, HOPPER, KernelCall, KernelVariant, each_once
from taut_kernels.gemm.w4a16 import decode_tile, dense, dispatch, lookup, portable, rule
from taut_kernels.gemm.w4a16.decode_kernel import w4a16_decode_kernel
from taut_kernels.gemm.w4a16.decode_ring_kernel import w4a16_decode_ring_kernel
from taut_kernels.gemm.w4a16.decode_ring_tile import RingTile
from taut_kernels.gemm.w4a16.decode_tile import DecodeTile
from taut_kernels.gemm.w4a16.dense_kernel import w4a16_dequantize_kernel
from taut_kernels.gemm.w4a16.lookup import BUCKETS, Choice, WgmmaTile
from taut_kernels.gemm.w4a16.pair_tile import WavesTile
from taut_kernels.gemm.w4a16.plan import Weight
from taut_kernels.gemm.w4a16.portable_kernel import reorder_kernel, w4a16_wgmma_kernel
from taut_kernels.gemm.w4a16.ring_kernel import w4a16_wgmma_ring_kernel
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.gemm.w4a16.tma_kernel import w4a16_wgmma_tma_kernel
from taut_kernels.gemm.w4a16.weight_format import WeightFormat

BF16, FP16 = torch.bfloat16, torch.float16
_NAMES = {BF16: "bf16", FP16: "fp16"}
_N = 8192
MAX_SPILL_BYTES = 80
"""Local memory a thread of a register-capped tile of few tokens may use: ptxas hoists loads and
spills a little or puts a few addresses aside; measured, it pays (README, "Measured facts")."""
_RING_SPILL_BYTES = 32
"""Likewise of the `wgmma` ring, outside the loop."""


class Format(NamedTuple):
    """Types of a layer.

    Attributes:
        dtype: of activations and scales.
        has_zeros: with zero points.
        group_size: 0 for one group a channel.
    """

    dtype: torch.dtype
    has_zeros: bool
    group_size: int

    def __str__(self) -> str:
        """As labels name it."""
        scheme = "asym" if self.has_zeros else "sym"
        return f"{_NAMES[self.dtype]} {scheme} group={self.group_size or 'channel'}"


LARGEST = Format(BF16, True, 32)
"""Takes most registers and shared memory."""
FORMATS = (LARGEST, Format(FP16, False, 64), Format(FP16, True, 128), Format(BF16, True, 0))


def _of(weights: WeightFormat) -> Format:
    return Format(BF16, weights.zero_points, weights.group_size)


def operands(N: int, K: int, form: Format) -> Weight:
    """Return a layer's operands without memory."""

    def empty(*shape: int, dtype: torch.dtype = form.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    quads = -(-K // (form.group_size or K) // 4)
    words = torch.int32
    return Weight(
        empty(N // 16, K // 64, 32, 4, dtype=words),
        empty(N // 16, quads, 8, 4, 2),
        empty(N // 16, quads, 8, dtype=words) if form.has_zeros else None,
        empty(N),
        empty(N // 16, dtype=words),
    )


def _multiply(tile: Any, M: int, K: int, form: Format) -> None:
    x = torch.empty(M, K, dtype=form.dtype, device="meta")
    dispatch.launch(tile, x, *operands(_N, K, form), form.group_size or K)


def decode_call(
    tile: DecodeTile, K: int, most: int, form: Format, targets: tuple[str, ...] = HOPPER
) -> KernelCall:
    """Describe a call of up to 8 or 16 tokens, ``most``."""
    return KernelCall(
        f"w4a16_decode {form} K={K} M≤{most}",
        w4a16_decode_kernel,
        tile,
        partial(_multiply, tile, most - 3, K, form),
        targets,
        MAX_SPILL_BYTES if tile.registers else 0,
    )


def _decode_calls() -> Iterator[KernelCall]:
    # Only cards of compute capability 9.0 were measured.
    for table in decode_tile.tables().values():
        for (_, K, own), tile in table.choices.items():
            yield decode_call(tile, K, decode_tile.TOKENS, _of(own))
    for target, most in itertools.product(BOTH, (decode_tile.TOKENS, lookup.DECODE_TOKENS)):
        tile = decode_tile.plain_rule(4096, 4096, most)
        for form in FORMATS:
            # 576 = 9 chunks: no cut of it comes out even, so loads are masked.
            for K in (4096, 576) if form.group_size in (0, 64) else (4096,):
                yield decode_call(tile, K, most, form, (target,))
    # Without a loop (K = 1024) registers may be capped; the format that takes most of them.
    for known, figures in decode_tile.CANDIDATES:
        for N, K in ((4096, 4096), (4096, 1024), (32768, 1024)):
            for tile, _ in decode_tile.splits_of(known, figures, N, K):
                yield decode_call(tile, K, decode_tile.TOKENS, LARGEST)


def ring_call(tile: RingTile, K: int, token_tiles: int, form: Format) -> KernelCall:
    """Describe a call of up to 64 tokens through the ring of `mma.sync`."""
    return KernelCall(
        f"w4a16_decode_ring {form} K={K} M≤{8 * token_tiles}",
        w4a16_decode_ring_kernel,
        tile,
        partial(_multiply, tile, 8 * token_tiles - 3, K, form),
        HOPPER,
        # Without a cap ptxas still aims at 80 or 128 registers and spills one or two, outside the
        # loop.
        MAX_SPILL_BYTES if tile.registers else 16,
    )


def _decode_ring_calls() -> Iterator[KernelCall]:
    for K, bucket, own, tile in _measured(RingTile):
        yield ring_call(tile, K, BUCKETS[bucket] // 8, _of(own))
    for tile in rule.every_tile(RingTile):
        yield ring_call(tile, 4096, 2, LARGEST)
    for form in FORMATS:
        yield ring_call(RingTile(2, 4, 2, 2, 4), 4096, 2, form)
        if form.group_size in (0, 64):
            yield ring_call(RingTile(1, 4, 2, 1, 4), 576, 2, form)


def products_of(choice: Choice) -> Iterator[WgmmaTile | WgmmaRingTile | RingTile]:
    """Yield the tiles of a table's choice."""
    if isinstance(choice, WavesTile):
        yield choice.head
        yield choice.tail
    elif not isinstance(choice, str):
        yield choice


def _measured(kind: type[Any]) -> Iterator[tuple[int, int, WeightFormat, Any]]:
    """Yield K, bucket, format and tile of the tables' choices of one kind."""
    for table in lookup.tables().values():
        for (_, K, bucket, own), choice in table.choices.items():
            for tile in products_of(choice):
                if isinstance(tile, kind):
                    yield K, bucket, own, tile


def product_call(
    tile: WgmmaTile, K: int, form: Format, targets: tuple[str, ...] = HOPPER
) -> KernelCall:
    """Describe a call of the portable kernel."""
    run = partial(_multiply, tile, 13, K, form)
    return KernelCall(f"w4a16_wgmma {form} K={K}", w4a16_wgmma_kernel, tile, run, targets)


def _portable_calls() -> Iterator[KernelCall]:
    for K, _, own, tile in _measured(WgmmaTile):
        yield product_call(tile, K, _of(own))
    chosen = {
        (K, lookup.plain_rule(4096, K, tokens)): None for tokens in BUCKETS for K in (4096, 576)
    }
    for K, tile in chosen:
        if not isinstance(tile, WgmmaTile):
            continue
        # Larger sums are made for wgmma, which spreads them over a warp group.
        small = tile.block_m <= 64
        for target in ("sm_90", "sm_80") if small else HOPPER:
            for form in FORMATS:
                yield product_call(tile, K, form, (target,))
    for form in FORMATS:
        group_size, weight = form.group_size or 4096, operands(_N, 4096, form)
        run = partial(dense.dequantize, weight, group_size, 3, 13)
        yield KernelCall(f"w4a16_dequantize {form}", w4a16_dequantize_kernel, "one", run)
    for dtype, name in _NAMES.items():
        run_reorder = partial(portable.reorder, torch.empty(3, 4096, dtype=dtype, device="meta"))
        yield KernelCall(f"w4a16_reorder {name}", reorder_kernel, "one", run_reorder)


def wgmma_call(tile: WgmmaRingTile, K: int, form: Format) -> KernelCall:
    """Describe a call of a `wgmma` kernel behind a ring that `cp.async` or TMA fills."""
    kernel = w4a16_wgmma_tma_kernel if tile.tma else w4a16_wgmma_ring_kernel
    run = partial(_multiply, tile, 13, K, form)
    label = f"w4a16_wgmma_{'tma' if tile.tma else 'ring'} {form} K={K}"
    spill = _RING_SPILL_BYTES if tile.registers else 0
    return KernelCall(label, kernel, tile, run, HOPPER, spill)


_EVERY_FORMAT = (
    (4096, WgmmaRingTile(64, 1, 2, 2, 2, 4, parts=2, running=2)),
    (576, WgmmaRingTile(32, 2, 1, 2, 1, 4, parts=4, running=3)),
    (4096, WgmmaRingTile(64, 1, 2, 2, 3, 4, 80, parts=2, running=2, tma=True)),
    (4096, WgmmaRingTile(16, 2, 1, 4, 1, 4, 128, tma=True, parts=2)),
    (576, WgmmaRingTile(32, 1, 1, 1, 2, 4, 128, parts=4, tma=True)),
    (4096, WgmmaRingTile(192, 1, 2, 2, 1, 3, 168, parts=2, running=2, tma=True)),
)


def _wgmma_calls() -> Iterator[KernelCall]:
    for K, _, own, tile in _measured(WgmmaRingTile):
        yield wgmma_call(tile, K, _of(own))
    for tile in rule.every_tile(WgmmaRingTile):
        yield wgmma_call(tile, 4096, LARGEST)
    for form in FORMATS:
        for K, tile in _EVERY_FORMAT:
            if K == 4096 or form.group_size in (0, 64):
                yield wgmma_call(tile, K, form)


def decode_variants() -> Iterator[KernelVariant]:
    """Yield the forms of the kernel of few tokens."""
    return each_once(_decode_calls())


def decode_ring_variants() -> Iterator[KernelVariant]:
    """Yield the forms of the ring of `mma.sync`, which cards of 9.0 alone choose."""
    return each_once(_decode_ring_calls())


def portable_variants() -> Iterator[KernelVariant]:
    """Yield the forms of the portable kernel, and of what stands around it."""
    return each_once(_portable_calls())


def wgmma_variants() -> Iterator[KernelVariant]:
    """Yield the forms of the `wgmma` rings, which cards of 9.0 alone choose."""
    return each_once(_wgmma_calls())


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield every form of the op's kernels."""
    for variants in (decode_variants, decode_ring_variants, portable_variants, wgmma_variants):
        yield from variants()
