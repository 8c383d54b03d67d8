"""Which forms of the `wgmma` ring kernel are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16 import rule as tiles_wgmma_rule
from taut_kernels.gemm.w4a16 import tma as w4a16_wgmma_tma
from taut_kernels.gemm.w4a16.portable_variants import products_of
from taut_kernels.gemm.w4a16.ring import launch_constants
from taut_kernels.gemm.w4a16.ring_kernel import w4a16_wgmma_ring_kernel
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.gemm.w4a16.tma_kernel import w4a16_wgmma_tma_kernel
from taut_kernels.launch import launcher
from taut_kernels.launch.variant import KernelVariant, each_once

_FORMATS = (("bf16", True, 32), ("fp16", False, 64), ("fp16", True, 128), ("bf16", True, 0))
_LARGEST_FORMAT = _FORMATS[0]
"""Takes most registers and shared memory."""
_MAX_SPILL_BYTES = 32
"""Under a cap on registers ptxas spills a few addresses outside the loop; measured, it pays."""


@each_once
def kernel_variants() -> Iterator[KernelVariant]:
    """Yield what ahead-of-time compilation checks: every measured tile, and every weight format.

    Tables and the rule choose the kernel on cards of compute capability 9.0 alone.
    """
    measured = {
        (K, tile, own): None
        for table in tiles_wgmma.tables().values()
        for (_, K, _, own), choice in table.choices.items()
        for tile in products_of(choice)
        if isinstance(tile, WgmmaRingTile)
    }
    for K, tile, own in measured:
        yield _any_variant(tile, K, "bf16", own.zero_points, own.group_size)
    for tile in tiles_wgmma_rule.every_tile(WgmmaRingTile):
        yield _any_variant(tile, 4096, *_LARGEST_FORMAT)
    for dtype, has_zeros, group_size in _FORMATS:
        # 576 = 9 chunks: no cut of it comes out even, so copies are masked.
        for K, tile in (
            (4096, WgmmaRingTile(64, 1, 2, 2, 2, 4, parts=2, running=2)),
            (576, WgmmaRingTile(32, 2, 1, 2, 1, 4, parts=4, running=3)),
            (4096, WgmmaRingTile(64, 1, 2, 2, 3, 4, 80, parts=2, running=2, tma=True)),
            (4096, WgmmaRingTile(16, 2, 1, 4, 1, 4, 128, tma=True, parts=2)),
            (576, WgmmaRingTile(32, 1, 1, 1, 2, 4, 128, parts=4, tma=True)),
            (4096, WgmmaRingTile(192, 1, 2, 2, 1, 3, 168, parts=2, running=2, tma=True)),
        ):
            if K == 4096 or group_size in (0, 64):
                yield _any_variant(tile, K, dtype, has_zeros, group_size)


def _any_variant(
    tile: WgmmaRingTile,
    K: int,
    dtype: str,
    has_zeros: bool,
    group_size: int,
) -> KernelVariant:
    if tile.tma:
        return _fed_variant(tile, K, dtype, has_zeros, group_size)
    return _variant(tile, K, dtype, has_zeros, group_size)


def _fed_variant(
    tile: WgmmaRingTile, K: int, dtype: str, has_zeros: bool, group_size: int
) -> KernelVariant:
    pointers = {"scales_ptr": dtype, "bias_ptr": dtype, "y_ptr": dtype}
    optional = {
        "zeros_ptr": "i32" if has_zeros else None,
        "partial_ptr": "fp32" if tile.split_k > 1 else None,
        "arrivals_ptr": "i32" if tile.split_k > 1 else None,
    }
    pointers |= {name: element for name, element in optional.items() if element is not None}
    absent = {name: None for name, element in optional.items() if element is None}
    words = ", ".join(map(str, w4a16_wgmma_tma.word_block(tile)))
    piece = tile.block_m // tile.pieces
    scheme = f"{'asym' if has_zeros else 'sym'} group={group_size or 'channel'}"
    return KernelVariant(
        label=f"w4a16_wgmma_tma {dtype} {scheme} K={K}",
        kernel=w4a16_wgmma_tma_kernel,
        tile=tile,
        pointers=pointers,
        integers=("M", "N"),
        divisible_by_16=("N",),
        constants=w4a16_wgmma_tma.launch_constants(tile, K, group_size, has_zeros=has_zeros)
        | absent
        | {"HAS_BIAS": True},
        descriptors={
            "x_desc": f"{dtype}[{piece}, 64],{w4a16_wgmma_tma.TOKEN_LAYOUT!r}",
            "w_desc": f"i32[{words}],{w4a16_wgmma_tma.WORD_LAYOUT!r}",
        },
        options={"num_warps": tile.num_warps, "maxnreg": tile.registers or None}
        | launcher.PDL_OPTIONS[True],
        targets=("sm_90",),
        allowed_spill_bytes=_MAX_SPILL_BYTES if tile.registers else 0,
    )


def _variant(
    tile: WgmmaRingTile,
    K: int,
    dtype: str,
    has_zeros: bool,
    group_size: int,
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
        label=f"w4a16_wgmma_ring {dtype} {scheme} K={K}",
        kernel=w4a16_wgmma_ring_kernel,
        tile=tile,
        pointers=pointers,
        integers=("M", "N", "stride_xm"),
        divisible_by_16=("N", "stride_xm"),
        constants=launch_constants(tile, K, group_size, has_zeros=has_zeros)
        | absent
        | {
            "HAS_BIAS": True,
            "ELEMENT": "f16" if dtype == "fp16" else dtype,
            "ROW_TILES": tile.group_tiles,
        },
        options={"num_warps": tile.num_warps, "maxnreg": tile.registers or None}
        | launcher.PDL_OPTIONS[True],
        targets=("sm_90",),
        allowed_spill_bytes=_MAX_SPILL_BYTES if tile.registers else 0,
    )
