"""Which forms of the 8-bit kernels are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from taut_kernels.gemm.scaled_mm import blocks_hopper as blocks
from taut_kernels.gemm.scaled_mm import blocks_pairs as block_pairs
from taut_kernels.gemm.scaled_mm import few, hopper, pairs
from taut_kernels.gemm.scaled_mm import lookup as tiles_scaled_mm
from taut_kernels.gemm.scaled_mm import rule as tiles_scaled_mm_rule
from taut_kernels.gemm.scaled_mm import tile as tiles_scaled_mm_tile
from taut_kernels.gemm.scaled_mm.blocks_portable_kernel import fp8_block_kernel
from taut_kernels.gemm.scaled_mm.few_kernel import scaled_mm_few_kernel
from taut_kernels.gemm.scaled_mm.hopper_kernel import scaled_mm_hopper_kernel
from taut_kernels.gemm.scaled_mm.pairs_kernel import scaled_mm_pairs_kernel
from taut_kernels.gemm.scaled_mm.portable_kernel import scaled_mm_kernel
from taut_kernels.gemm.scaled_mm.tile import PREFETCH, ScaledMmTile
from taut_kernels.gemm.scaled_mm.turns_kernel import scaled_mm_turns_kernel
from taut_kernels.launch.variant import KernelVariant

ELEMENT = {"w8a8_gemm": "i8", "fp8_gemm": "fp8e4nv", "fp8_block": "fp8e4nv"}
_RULE_SHAPES = ((4096, 4096), (1280, 8192), (10240, 8192), (28672, 4096), (57344, 8192))
_RULE_TOKENS = (1, 32, 64, 128, 256, 4096)
ALL_TARGETS, HOPPER = ("sm_80", "sm_90"), ("sm_90",)


def _every_tile(op: str) -> Iterator[tuple[ScaledMmTile, int, tuple[str, ...]]]:
    """Yield tile, K and targets: what the rule or a wide search can reach, then every table's."""
    targets = ALL_TARGETS if op == "w8a8_gemm" else HOPPER
    for N, K in _RULE_SHAPES:
        for M in _RULE_TOKENS:
            yield tiles_scaled_mm_rule.rule(op, N, K, M), K, targets
    searched = (*tiles_scaled_mm_tile.tiles_of_parts(), *tiles_scaled_mm_tile.tiles_of_few())
    of_blocks = tiles_scaled_mm_tile.tiles_of_blocks()
    apart = (tile for tile in of_blocks if tiles_scaled_mm_tile.most_shared_tokens(tile))
    searched += (*of_blocks, *(replace(tile, split_k=2) for tile in apart))
    of_pairs = tiles_scaled_mm_tile.tiles_of_pairs()
    searched += (
        *of_pairs,
        *(replace(tile, early=True, prefetch=PREFETCH) for tile in of_pairs),
    )
    searched += tuple(replace(tile, split_k=2) for tile in of_pairs if tile.block_n == 64)
    for tile in (*tiles_scaled_mm_rule.FED_BY_TMA, *searched):
        if tiles_scaled_mm_tile.why_not_for(tile, op, 4096) is None:
            yield tile, 4096, HOPPER
    for table in tiles_scaled_mm.tables().values():
        for some in (table.buckets, table.in_layer):
            for (row_op, _, K), buckets in some.items():
                for bucket in buckets if row_op == op else ():
                    yield bucket.tile, K, HOPPER
    tile = tiles_scaled_mm_rule.rule(op, 4096, 4096, 1)
    yield replace(tile, early=True, prefetch=PREFETCH), 4096, HOPPER


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield what ahead-of-time compilation checks: each op's tiles, zero points, an early start.

    A tile that does not divide its K is compiled in the masked form, which every tile of the rule
    is compiled in as well.
    """
    for op in tiles_scaled_mm_tile.OPS:
        seen = set()
        for tile, K, targets in _every_tile(op):
            even = K % (tile.block_k * tile.split_k) == 0
            for even_k in (even, False) if targets == ALL_TARGETS else (even,):
                if (tile, even_k) in seen:
                    continue
                seen.add((tile, even_k))
                yield variant(op, tile, targets, even_k=even_k)
    yield from _options_of_w8a8()


def _options_of_w8a8() -> Iterator[KernelVariant]:
    ring = tiles_scaled_mm_rule.rule("w8a8_gemm", 28672, 4096, 1)
    shared = ScaledMmTile("hopper", 128, 256, 128, 4, 4)
    turns = ScaledMmTile("turns", 128, 128, 128, 4, 6)
    more = (*tiles_scaled_mm_tile.tiles_of_parts(), *tiles_scaled_mm_tile.tiles_of_few())
    more += tuple(tiles_scaled_mm_tile.tiles_of_pairs())
    fed = [(tile, HOPPER) for tile in more]
    for tile, targets in ((ring, ALL_TARGETS), (shared, HOPPER), (turns, HOPPER), *fed):
        for has_azp in (False, True):
            yield variant(
                "w8a8_gemm", tile, targets, even_k=True, has_azp_adj=True, has_azp=has_azp
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
        op: one of :data:`tiles_scaled_mm_tile.OPS`.
        tile: how the work is cut.
        targets: architectures it must compile for.
        even_k: K is a multiple of the step (``ring`` only).
        has_azp_adj: with the zero point's column term.
        has_azp: with a zero point a token.
    """
    if tile.kernel == tiles_scaled_mm_tile.PAIRS and op == "fp8_block":
        return _block_pairs_variant(tile, even_k)
    if tile.kernel == tiles_scaled_mm_tile.PAIRS:
        return _pairs_variant(op, tile, even_k, has_azp_adj, has_azp)
    if tile.kernel == "few":
        return _few_variant(op, tile, has_azp_adj, has_azp)
    if tile.kernel == tiles_scaled_mm_tile.BLOCKS:
        return _blocks_variant(op, tile)
    if tile.kernel != "ring":
        return _hopper_variant(op, tile, has_azp_adj, has_azp)
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
        kernel=fp8_block_kernel if op == "fp8_block" else scaled_mm_kernel,
        tile=tile,
        pointers=pointers,
        integers=(*_INTEGERS[op], "stride_xm", "stride_wn"),
        divisible_by_16=("N", "K", "stride_xm", "stride_wn"),
        constants=constants,
        targets=targets,
        options={
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "launch_pdl": tile.early,
        },
    )


def _vectors(constants: dict[str, Any], has_azp_adj: bool, has_azp: bool) -> dict[str, str]:
    """Return the pointers of what scales sums; name the absent ones in ``constants``."""
    pointers = {"x_scale_ptr": "fp32", "w_scale_ptr": "fp32", "bias_ptr": "bf16"}
    for name, present in (("azp_adj_ptr", has_azp_adj), ("azp_ptr", has_azp)):
        pointers |= {name: "i32"} if present else {}
        constants |= {} if present else {name: None}
    return pointers


def _few_variant(op: str, tile: ScaledMmTile, has_azp_adj: bool, has_azp: bool) -> KernelVariant:
    constants = few.launch_constants(tile)
    pointers = _vectors(constants, has_azp_adj, has_azp) | {"y_ptr": "bf16"}
    _add_parts(op, tile, pointers, constants)
    element, layout = ELEMENT[op], hopper.OPERAND_LAYOUT
    return KernelVariant(
        label=f"{op} few{' azp_adj' * has_azp_adj}{' azp' * has_azp}",
        kernel=scaled_mm_few_kernel,
        tile=tile,
        pointers=pointers,
        integers=("M", "N", "steps", "stride_xs", "stride_ws"),
        divisible_by_16=("N",),
        constants=constants,
        descriptors={
            "x_desc": f"{element}[{few.TOKENS}, {hopper.STEP}],{layout!r}",
            "w_desc": f"{element}[{tile.block_n}, {hopper.STEP}],{layout!r}",
        },
        targets=HOPPER,
        options=few.launch_options(tile),
    )


def _block_pairs_variant(tile: ScaledMmTile, even_k: bool) -> KernelVariant:
    constants: dict[str, Any] = {}
    pointers = {"x_scale_ptr": "fp32", "w_scale_ptr": "fp32", "bias_ptr": "bf16"}
    launcher = block_pairs.launcher()
    described = _of_pairs("fp8_block", launcher.kernel, tile, pointers, constants, even_k)
    return replace(described, assembler=launcher.assembler)


def _pairs_variant(
    op: str, tile: ScaledMmTile, even_k: bool, has_azp_adj: bool, has_azp: bool
) -> KernelVariant:
    constants: dict[str, Any] = {}
    pointers = _vectors(constants, has_azp_adj, has_azp)
    described = _of_pairs(op, scaled_mm_pairs_kernel, tile, pointers, constants, even_k)
    named = f"{described.label}{' azp_adj' * has_azp_adj}{' azp' * has_azp}"
    return replace(described, label=named)


def _of_pairs(
    op: str,
    kernel: Any,
    tile: ScaledMmTile,
    pointers: dict[str, str],
    constants: dict[str, Any],
    even_k: bool,
) -> KernelVariant:
    """Describe a kernel on the ring of pairs of blocks."""
    constants |= pairs.launch_constants(tile, tile.block_k) | {"EVEN_K": even_k}
    _add_workspace(op, tile, pointers, constants)
    return KernelVariant(
        label=f"{op} pairs{'' if even_k else ' masked'}",
        kernel=kernel,
        tile=tile,
        pointers=pointers,
        integers=(*_INTEGERS[op], "stride_xm", "stride_wn"),
        divisible_by_16=("N", "K", "stride_xm", "stride_wn"),
        constants=constants,
        targets=HOPPER,
        options=pairs.launch_options(tile),
    )


def _hopper_variant(op: str, tile: ScaledMmTile, has_azp_adj: bool, has_azp: bool) -> KernelVariant:
    constants = hopper.launch_constants(tile)
    pointers = _vectors(constants, has_azp_adj, has_azp)
    element, layout = ELEMENT[op], hopper.OPERAND_LAYOUT
    rows = hopper.rows_of_block(tile)
    columns, further = hopper.columns_of_blocks(tile)
    width, result = hopper.result_layout(tile)
    descriptors = {
        "x_desc": f"{element}[{rows}, {hopper.STEP}],{layout!r}",
        "w_desc": f"{element}[{columns}, {hopper.STEP}],{layout!r}",
        "y_desc": f"bf16[{rows}, {width}],{result!r}",
    }
    if further:
        descriptors["more_desc"] = f"{element}[{further}, {hopper.STEP}],{layout!r}"
    else:
        constants |= {"more_desc": None}
    kernel = scaled_mm_turns_kernel if tile.kernel == "turns" else scaled_mm_hopper_kernel
    label = f"{op} {tile.kernel}{' azp_adj' * has_azp_adj}{' azp' * has_azp}"
    return _persistent_variant(label, kernel, tile, pointers, constants, descriptors)


def _blocks_variant(op: str, tile: ScaledMmTile) -> KernelVariant:
    tall = blocks.is_tall(tile)
    constants = blocks.launch_constants(tile)
    pointers = {"x_scale_ptr": "fp32", "w_scale_ptr": "fp32", "bias_ptr": "bf16"}
    if not tall:
        _add_parts(op, tile, pointers, constants)
    element, layout = ELEMENT[op], hopper.OPERAND_LAYOUT
    rows = hopper.ROWS
    width, result = hopper.result_layout(tile)
    descriptors = {
        "x_desc": f"{element}[{blocks.tokens_of_box(tile)}, {hopper.STEP}],{layout!r}",
        "w_desc": f"{element}[{tile.block_n}, {hopper.STEP}],{layout!r}",
        "y_desc": f"bf16[{rows}, {width}],{result!r}",
    }
    label = f"{op} {tile.kernel}{' of 256 tokens' if tall else ''}"
    launcher = blocks.launcher(tile)
    described = _persistent_variant(label, launcher.kernel, tile, pointers, constants, descriptors)
    described = replace(described, options=blocks.launch_options(tile))
    spill = _PARTS_SPILL_BYTES if tile.split_k > 2 else 0
    return replace(described, allowed_spill_bytes=spill, assembler=launcher.assembler)


def _persistent_variant(
    label: str,
    kernel: Any,
    tile: ScaledMmTile,
    pointers: dict[str, str],
    constants: dict[str, Any],
    descriptors: dict[str, str],
) -> KernelVariant:
    """Describe a kernel that TMA feeds and whose other arguments are integers of any value."""
    known = {*constants, *pointers, *descriptors}
    return KernelVariant(
        label=label,
        kernel=kernel,
        tile=tile,
        pointers=pointers,
        integers=tuple(n for n in kernel.arg_names if n not in known),
        divisible_by_16=(),
        constants=constants,
        descriptors=descriptors,
        targets=HOPPER,
        options={"num_warps": tile.num_warps},
    )


_PARTS_SPILL_BYTES = 8
"""Of blocks in four parts: a frame to which no instruction writes (SASS)."""
_INTEGERS = {
    "w8a8_gemm": ("M", "N", "K", "stride_xs", "stride_ws"),
    "fp8_gemm": ("M", "N", "K", "stride_xs", "stride_ws"),
    "fp8_block": ("M", "N", "K", "stride_xsm", "stride_xsk", "stride_wsn"),
}


def _add_workspace(
    op: str, tile: ScaledMmTile, pointers: dict[str, str], constants: dict[str, Any]
) -> None:
    pointers |= {"x_ptr": ELEMENT[op], "w_ptr": ELEMENT[op], "y_ptr": "bf16"}
    _add_parts(op, tile, pointers, constants)


def _add_parts(
    op: str, tile: ScaledMmTile, pointers: dict[str, str], constants: dict[str, Any]
) -> None:
    if tile.split_k > 1:
        pointers["partial_ptr"] = "i32" if op == "w8a8_gemm" else "fp32"
        pointers["arrivals_ptr"] = "i32"
    else:
        constants |= {"partial_ptr": None, "arrivals_ptr": None}
