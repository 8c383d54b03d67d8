"""Which forms of the decode kernel are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from taut_kernels.gemm.w4a16 import decode_tile as tiles_decode
from taut_kernels.gemm.w4a16.decode import launch_constants
from taut_kernels.gemm.w4a16.decode_kernel import w4a16_decode_kernel
from taut_kernels.launch import launcher
from taut_kernels.launch.variant import KernelVariant, each_once

MAX_SPILL_BYTES = 80
"""Local memory a thread of a register-capped tile may use (README, "Measured facts")."""


@each_once
def kernel_variants() -> Iterator[KernelVariant]:
    """Yield what ahead-of-time compilation checks: every measured tile, and every weight format.

    K is a constant of the kernel, so that the shapes of a model not named in a table compile when
    it is loaded; these variants stand for them.
    """
    tables = tiles_decode.tables().values()
    measured = {(K, m, own, tile): None for t in tables for (_, K, m, own), tile in t.tiles.items()}
    # Only cards of compute capability 9.0 were measured.
    for K, token_tiles, own, tile in measured:
        yield _variant(tile, K, token_tiles, "bf16", own.zero_points, own.group_size, "sm_90")
    for target in ("sm_80", "sm_90"):
        yield from _every_format(target)
    # Without a loop (K = 1024) registers may be capped; the format that takes most of them.
    of_rule = {
        (K, tile): None
        for known, figures in tiles_decode.CANDIDATES
        for N, K in ((4096, 4096), (4096, 1024), (32768, 1024))
        for tile, _ in tiles_decode.splits_of(known, figures, N, K)
    }
    for K, tile in of_rule:
        yield _variant(tile, K, 1, "bf16", True, 32, "sm_90")


def _every_format(target: str) -> Iterator[KernelVariant]:
    for token_tiles in (1, 2):
        tile = tiles_decode.plain_rule(4096, 4096, token_tiles)
        for dtype, has_zeros, group_size in (
            ("bf16", True, 32),
            ("fp16", False, 64),
            ("fp16", True, 128),
            ("bf16", True, 0),
        ):
            # 576 = 9 chunks: no cut of it comes out even, so loads are masked.
            for K in (4096, 576) if group_size in (0, 64) else (4096,):
                yield _variant(tile, K, token_tiles, dtype, has_zeros, group_size, target)


def _variant(
    tile: tiles_decode.DecodeTile,
    K: int,
    token_tiles: int,
    dtype: str,
    has_zeros: bool,
    group_size: int,
    target: str,
) -> KernelVariant:
    pdl = target == "sm_90"
    pointers = {"x_ptr": dtype, "qweight_ptr": "i32", "scales_ptr": dtype, "y_ptr": dtype}
    absent: dict[str, None] = {}
    optional = {
        "zeros_ptr": "i32" if has_zeros else None,
        "bias_ptr": dtype,
        "partial_ptr": "fp32" if tile.split_k > 1 else None,
        "arrivals_ptr": "i32" if tile.split_k > 1 else None,
    }
    for name, element in optional.items():
        if element is None:
            absent[name] = None
        else:
            pointers[name] = element
    scheme = f"{'asym' if has_zeros else 'sym'} group={group_size or 'channel'}"
    return KernelVariant(
        label=f"w4a16_decode {dtype} {scheme} K={K} M≤{8 * token_tiles}",
        kernel=w4a16_decode_kernel,
        tile=tile,
        pointers=pointers,
        integers=("M", "N", "stride_xm"),
        divisible_by_16=("N", "stride_xm"),
        constants=launch_constants(tile, K, token_tiles, group_size, pdl=pdl)
        | absent
        | {
            "HAS_ZEROS": has_zeros,
            "HAS_BIAS": True,
            "ELEMENT": "f16" if dtype == "fp16" else dtype,
            "ROW_TILES": tile.row_tiles,
        },
        options={"num_warps": tile.num_warps, "maxnreg": tile.registers or None}
        | launcher.PDL_OPTIONS[pdl],
        targets=(target,),
        # Under a cap on registers ptxas hoists loads and spills a little; measured, it pays.
        allowed_spill_bytes=MAX_SPILL_BYTES if tile.registers else 0,
    )
