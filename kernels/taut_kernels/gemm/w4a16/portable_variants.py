"""Which forms of the W4A16 kernels beyond 16 tokens are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from taut_kernels.gemm.w4a16 import dense as w4a16_dense
from taut_kernels.gemm.w4a16 import lookup as tiles_wgmma
from taut_kernels.gemm.w4a16.dense_kernel import w4a16_dequantize_kernel
from taut_kernels.gemm.w4a16.lookup import BUCKETS, Choice, WgmmaTile
from taut_kernels.gemm.w4a16.pair_tile import WavesTile
from taut_kernels.gemm.w4a16.portable import launch_constants
from taut_kernels.gemm.w4a16.portable_kernel import reorder_kernel, w4a16_wgmma_kernel
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile
from taut_kernels.launch import launcher
from taut_kernels.launch.variant import KernelVariant, each_once

_FORMATS = (("bf16", True, 32), ("fp16", False, 64), ("fp16", True, 128), ("bf16", True, 0))


@each_once
def kernel_variants() -> Iterator[KernelVariant]:
    """Yield what ahead-of-time compilation checks: every measured tile, and every weight format.

    K is a constant of the kernels, so that the shapes of a model not named in a table compile when
    it is loaded; these variants stand for them.
    """
    tables = tiles_wgmma.tables().values()
    measured = {
        (K, tile, own): None
        for t in tables
        for (_, K, _, own), choice in t.choices.items()
        for tile in products_of(choice)
        if isinstance(tile, WgmmaTile)
    }
    # Only cards of compute capability 9.0 were measured.
    for K, tile, own in measured:
        yield _product(tile, K, "bf16", own.zero_points, own.group_size, "sm_90")
    yield from _every_format()
    for dtype, has_zeros, group_size in _FORMATS:
        yield _dequantize(dtype, has_zeros, group_size)
    for dtype in ("bf16", "fp16"):
        for target in ("sm_80", "sm_90"):
            yield _reorder(dtype, target)


def products_of(choice: Choice) -> Iterator[WgmmaTile | WgmmaRingTile]:
    """Yield the tiles of a table's choice."""
    if isinstance(choice, WavesTile):
        yield choice.head
        yield choice.tail
    elif isinstance(choice, WgmmaTile | WgmmaRingTile):
        yield choice


def _every_format() -> Iterator[KernelVariant]:
    """Yield what the rules choose, in every weight format."""
    # 576 = 9 chunks: odd, so a step takes one chunk and no cut of K comes out even.
    chosen = {
        (K, tiles_wgmma.plain_rule(4096, K, tokens)): None
        for tokens in BUCKETS
        for K in (4096, 576)
    }
    for K, tile in chosen:
        if not isinstance(tile, WgmmaTile):
            continue
        targets = ["sm_90"]
        if tile.block_m * tile.row_reps <= 64:
            # Larger sums are made for wgmma, which spreads them over a warp group.
            targets.append("sm_80")
        for target in targets:
            for dtype, has_zeros, group_size in _FORMATS:
                yield _product(tile, K, dtype, has_zeros, group_size, target)


def _scheme(has_zeros: bool, group_size: int) -> str:
    return f"{'asym' if has_zeros else 'sym'} group={group_size or 'channel'}"


def _product(
    tile: WgmmaTile,
    K: int,
    dtype: str,
    has_zeros: bool,
    group_size: int,
    target: str,
) -> KernelVariant:
    constants = launch_constants(tile, K, group_size, hopper=target == "sm_90")
    pointers = {"x_ptr": dtype, "qweight_ptr": "i32", "scales_ptr": dtype, "y_ptr": dtype}
    optional = {
        "zeros_ptr": "i32" if has_zeros else None,
        "bias_ptr": dtype,
        "partial_ptr": "fp32" if tile.split_k > 1 else None,
        "arrivals_ptr": "i32" if tile.split_k > 1 else None,
    }
    pointers |= {name: element for name, element in optional.items() if element is not None}
    absent = {name: None for name, element in optional.items() if element is None}
    return KernelVariant(
        label=f"w4a16_wgmma {dtype} {_scheme(has_zeros, group_size)} K={K}",
        kernel=w4a16_wgmma_kernel,
        tile=tile,
        pointers=pointers,
        integers=("M", "N", "stride_xm"),
        divisible_by_16=("N", "stride_xm"),
        constants=constants
        | absent
        | {"HAS_ZEROS": has_zeros, "HAS_BIAS": True, "ELEMENT": _element(dtype)},
        options={"num_warps": tile.num_warps} | launcher.PDL_OPTIONS[target == "sm_90"],
        targets=(target,),
    )


def _dequantize(dtype: str, has_zeros: bool, group_size: int) -> KernelVariant:
    pointers = {"qweight_ptr": "i32", "scales_ptr": dtype, "weight_ptr": dtype}
    return KernelVariant(
        label=f"w4a16_dequantize {dtype} {_scheme(has_zeros, group_size)}",
        kernel=w4a16_dequantize_kernel,
        tile="one",
        pointers=pointers | ({"zeros_ptr": "i32"} if has_zeros else {}),
        integers=("first_tile", "tiles"),
        divisible_by_16=(),
        constants={
            "K": 4096,
            "GROUP_SIZE": group_size,
            "HAS_ZEROS": has_zeros,
            "ELEMENT": _element(dtype),
            "CHUNKS_PER_PROGRAM": w4a16_dense.CHUNKS_PER_PROGRAM,
            "WARPS": w4a16_dense.WARPS,
        }
        | ({} if has_zeros else {"zeros_ptr": None}),
        options={"num_warps": w4a16_dense.WARPS},
    )


def _reorder(dtype: str, target: str) -> KernelVariant:
    return KernelVariant(
        label=f"w4a16_reorder {dtype}",
        kernel=reorder_kernel,
        tile="one",
        pointers={"x_ptr": dtype, "out_ptr": dtype},
        integers=("K", "stride_xm"),
        divisible_by_16=("K", "stride_xm"),
        constants={"BLOCK": 2048, "PDL": target == "sm_90"},
        options=dict(launcher.PDL_OPTIONS[target == "sm_90"]),
        targets=(target,),
    )


def _element(dtype: str) -> str:
    return "f16" if dtype == "fp16" else dtype
