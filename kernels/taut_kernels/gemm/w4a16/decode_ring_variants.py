"""Which forms of the ring kernel are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16 import rule as tiles_wgmma_rule
from taut_kernels.gemm.w4a16.decode_ring import launch_constants
from taut_kernels.gemm.w4a16.decode_ring_kernel import w4a16_decode_ring_kernel
from taut_kernels.gemm.w4a16.decode_ring_tile import RingTile
from taut_kernels.gemm.w4a16.decode_variants import MAX_SPILL_BYTES
from taut_kernels.gemm.w4a16.lookup import BUCKETS
from taut_kernels.launch import launcher
from taut_kernels.launch.variant import KernelVariant, each_once

_FORMATS = (("bf16", True, 32), ("fp16", False, 64), ("fp16", True, 128), ("bf16", True, 0))
_LARGEST_FORMAT = _FORMATS[0]
"""Takes most registers and shared memory."""


@each_once
def kernel_variants() -> Iterator[KernelVariant]:
    """Yield what ahead-of-time compilation checks: every measured tile, and every weight format.

    Tables and the rule choose the kernel on cards of compute capability 9.0 alone.
    """
    tables = tiles_wgmma.tables().values()
    measured = {
        (K, tile, BUCKETS[bucket] // 8, own): None
        for t in tables
        for (_, K, bucket, own), tile in t.choices.items()
        if isinstance(tile, RingTile)
    }
    for K, tile, token_tiles, own in measured:
        yield _variant(tile, K, token_tiles, "bf16", own.zero_points, own.group_size)
    for tile in tiles_wgmma_rule.every_tile(RingTile):
        yield _variant(tile, 4096, 2, *_LARGEST_FORMAT)
    for dtype, has_zeros, group_size in _FORMATS:
        # 576 = 9 chunks: no cut of it comes out even, so copies are masked.
        for K, tile in (
            (4096, RingTile(2, 4, 2, 2, 4)),
            (576, RingTile(1, 4, 2, 1, 4)),
        ):
            if K == 4096 or group_size in (0, 64):
                yield _variant(tile, K, 2, dtype, has_zeros, group_size)


def _variant(
    tile: RingTile, K: int, token_tiles: int, dtype: str, has_zeros: bool, group_size: int
) -> KernelVariant:
    pointers = {"x_ptr": dtype, "qweight_ptr": "i32", "scales_ptr": dtype, "y_ptr": dtype}
    optional = {
        "zeros_ptr": "i32" if has_zeros else None,
        "bias_ptr": dtype,
        "partial_ptr": "fp32" if tile.split_k > 1 else None,
        "arrivals_ptr": "i32" if tile.split_k > 1 else None,
    }
    pointers |= {name: element for name, element in optional.items() if element is not None}
    absent = {name: None for name, element in optional.items() if element is None}
    scheme = f"{'asym' if has_zeros else 'sym'} group={group_size or 'channel'}"
    return KernelVariant(
        label=f"w4a16_decode_ring {dtype} {scheme} K={K} M≤{8 * token_tiles}",
        kernel=w4a16_decode_ring_kernel,
        tile=tile,
        pointers=pointers,
        integers=("M", "N", "stride_xm"),
        divisible_by_16=("N", "stride_xm"),
        constants=launch_constants(tile, K, token_tiles, group_size, has_zeros=has_zeros, pdl=True)
        | absent
        | {
            "HAS_BIAS": True,
            "ELEMENT": "f16" if dtype == "fp16" else dtype,
            "ROW_TILES": tile.row_tiles,
        },
        options={"num_warps": tile.num_warps, "maxnreg": tile.registers or None}
        | launcher.PDL_OPTIONS[True],
        targets=("sm_90",),
        # Under a cap on registers ptxas spills a few addresses; measured, it pays. Without one it
        # still aims at 80 or 128 and spills one or two, outside the loop.
        allowed_spill_bytes=MAX_SPILL_BYTES if tile.registers else 16,
    )
