"""Which forms of the 8-bit kernels are compiled ahead of time (:mod:`taut_kernels.aot`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from taut_kernels import tiles_scaled_mm
from taut_kernels._variant import KernelVariant
from taut_kernels.gemm._fp8_block_jit import fp8_block_kernel
from taut_kernels.gemm._scaled_mm_jit import scaled_mm_kernel
from taut_kernels.gemm._scaled_mm_tma_jit import scaled_mm_tma_kernel
from taut_kernels.tiles_scaled_mm import ScaledMmTile

ELEMENT = {"w8a8_gemm": "i8", "fp8_gemm": "fp8e4nv", "fp8_block": "fp8e4nv"}
_RULE_SHAPES = ((4096, 4096), (28672, 4096))
_RULE_TOKENS = (1, 32, 64, 128)
ALL_TARGETS, HOPPER = ("sm_80", "sm_90"), ("sm_90",)


def _every_tile(op: str) -> Iterator[tuple[ScaledMmTile, int, tuple[str, ...]]]:
    """Yield tile, K and targets: what a card without a table can reach, then every table's."""
    targets = ALL_TARGETS if op == "w8a8_gemm" else HOPPER
    for N, K in _RULE_SHAPES:
        for M in _RULE_TOKENS:
            yield tiles_scaled_mm.rule(op, N, K, M), K, targets
    for table in tiles_scaled_mm.tables().values():
        for (row_op, _, K), buckets in table.buckets.items():
            for bucket in buckets if row_op == op else ():
                yield bucket.tile, K, HOPPER


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield what ahead-of-time compilation checks: each op's tiles, zero points, an early start.

    A tile that does not divide its K is compiled in the masked form, which every tile of the rule
    is compiled in as well.
    """
    for op in tiles_scaled_mm.OPS:
        seen = set()
        for tile, K, targets in _every_tile(op):
            even = K % (tile.block_k * tile.split_k) == 0
            for even_k in (even, False) if targets == ALL_TARGETS else (even,):
                if (tile, even_k) in seen:
                    continue
                seen.add((tile, even_k))
                yield variant(op, tile, targets, even_k=even_k)
    yield from _options_of_w8a8()
    for op in tiles_scaled_mm.OPS:
        tile = tiles_scaled_mm.rule(op, 4096, 4096, 1)
        early = dataclasses.replace(tile, early=True, prefetch=2)
        yield variant(op, early, HOPPER, even_k=True)


def _options_of_w8a8() -> Iterator[KernelVariant]:
    tile = tiles_scaled_mm.rule("w8a8_gemm", 28672, 4096, 1)
    for has_azp in (False, True):
        yield variant(
            "w8a8_gemm", tile, ALL_TARGETS, even_k=True, has_azp_adj=True, has_azp=has_azp
        )


def variant(
    op: str,
    tile: ScaledMmTile,
    targets: tuple[str, ...],
    *,
    even_k: bool,
    has_azp_adj: bool = False,
    has_azp: bool = False,
) -> KernelVariant:
    """Describe one specialisation, with a bias and bf16 results.

    Args:
        op: one of :data:`tiles_scaled_mm.OPS`.
        tile: how the work is cut.
        targets: architectures it must compile for.
        even_k: K is a multiple of the step (``ring`` only).
        has_azp_adj: with the zero point's column term.
        has_azp: with a zero point a token.
    """
    tma = tile.kernel == "tma"
    constants: dict[str, Any] = {
        "HAS_BIAS": True,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    pointers = {"x_scale_ptr": "fp32", "w_scale_ptr": "fp32", "bias_ptr": "bf16"}
    if op != "fp8_block":
        constants |= {"HAS_AZP_ADJ": has_azp_adj, "HAS_AZP": has_azp, "BLOCK_K": tile.block_k}
        for name, present in (("azp_adj_ptr", has_azp_adj), ("azp_ptr", has_azp)):
            pointers |= {name: "i32"} if present else {}
            constants |= {} if present else {name: None}
    if tma:
        constants |= {"GROUP_M": tile.group_m, "PARTS": tile.parts, "FLATTEN": tile.flatten}
    else:
        constants |= {"EVEN_K": even_k, "SPLIT_K": tile.split_k}
        constants |= {"EARLY": tile.early, "PREFETCH": tile.prefetch}
        _add_workspace(op, tile, pointers, constants)
    options = "".join(
        text
        for text, on in ((" azp_adj", has_azp_adj), (" azp", has_azp), (" masked", not even_k))
        if on
    )
    return KernelVariant(
        label=f"{op} {tile.kernel}{options}",
        kernel=_kernel(op, tile),
        tile=tile,
        pointers=pointers,
        integers=_INTEGERS[op] + (() if tma else ("stride_xm", "stride_wn")),
        divisible_by_16=("N", "K") + (() if tma else ("stride_xm", "stride_wn")),
        constants=constants,
        descriptors=_descriptors(op, tile) if tma else {},
        targets=targets,
        options={
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "launch_pdl": tile.early,
        },
    )


_INTEGERS = {
    "w8a8_gemm": ("M", "N", "K", "stride_xs", "stride_ws"),
    "fp8_gemm": ("M", "N", "K", "stride_xs", "stride_ws"),
    "fp8_block": ("M", "N", "K", "stride_xsm", "stride_xsk", "stride_wsn"),
}


def _kernel(op: str, tile: ScaledMmTile) -> Any:
    if op == "fp8_block":
        return fp8_block_kernel
    return scaled_mm_tma_kernel if tile.kernel == "tma" else scaled_mm_kernel


def _add_workspace(
    op: str, tile: ScaledMmTile, pointers: dict[str, str], constants: dict[str, Any]
) -> None:
    pointers |= {"x_ptr": ELEMENT[op], "w_ptr": ELEMENT[op], "y_ptr": "bf16"}
    if tile.split_k > 1:
        pointers["partial_ptr"] = "i32" if op == "w8a8_gemm" else "fp32"
        pointers["arrivals_ptr"] = "i32"
    else:
        constants |= {"partial_ptr": None, "arrivals_ptr": None}


def _descriptors(op: str, tile: ScaledMmTile) -> dict[str, str]:
    columns = tile.block_n // tile.parts
    return {
        "x_desc": f"{ELEMENT[op]}[{tile.block_m}, {tile.block_k}]",
        "w_desc": f"{ELEMENT[op]}[{tile.block_n}, {tile.block_k}]",
        "y_desc": f"bf16[{tile.block_m}, {columns}]",
    }
