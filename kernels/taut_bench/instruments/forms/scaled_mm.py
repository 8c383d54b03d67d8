"""Calls of the 8-bit products: each op's tiles, zero points, an early start.

Each has a bias and bf16 results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from taut_bench.instruments.recorder import BOTH, HOPPER, KernelCall, KernelVariant, each_once
from taut_kernels.gemm.scaled_mm import dispatch, lookup, rule
from taut_kernels.gemm.scaled_mm import tile as tiles
from taut_kernels.gemm.scaled_mm.blocks_hopper import is_tall
from taut_kernels.gemm.scaled_mm.blocks_hopper_kernel import fp8_block_hopper_kernel
from taut_kernels.gemm.scaled_mm.blocks_pairs_kernel import fp8_block_pairs_kernel
from taut_kernels.gemm.scaled_mm.blocks_portable_kernel import fp8_block_kernel
from taut_kernels.gemm.scaled_mm.blocks_tall_kernel import fp8_block_tall_kernel
from taut_kernels.gemm.scaled_mm.few_kernel import scaled_mm_few_kernel
from taut_kernels.gemm.scaled_mm.hopper_kernel import scaled_mm_hopper_kernel
from taut_kernels.gemm.scaled_mm.pairs_kernel import scaled_mm_pairs_kernel
from taut_kernels.gemm.scaled_mm.portable_kernel import scaled_mm_kernel
from taut_kernels.gemm.scaled_mm.tile import BLOCKS, PAIRS, PREFETCH, ScaledMmTile
from taut_kernels.gemm.scaled_mm.turns_kernel import scaled_mm_turns_kernel

_KERNELS = {
    "ring": scaled_mm_kernel,
    "hopper": scaled_mm_hopper_kernel,
    "turns": scaled_mm_turns_kernel,
    "few": scaled_mm_few_kernel,
    PAIRS: scaled_mm_pairs_kernel,
}
_BLOCK_KERNELS = {"ring": fp8_block_kernel, PAIRS: fp8_block_pairs_kernel}
_RULE_SHAPES = ((4096, 4096), (1280, 8192), (10240, 8192), (28672, 4096), (57344, 8192))
_RULE_TOKENS = (1, 32, 64, 128, 256, 4096)
_M, _N = 3, 4096
_PARTS_SPILL_BYTES = 8
"""Of blocks in four parts: a frame to which no instruction writes (SASS)."""
_MASKED = ("ring", PAIRS)
"""Kernels with a form of their own for a K that their steps do not divide."""


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _multiply(op: str, tile: ScaledMmTile, K: int, has_azp_adj: bool, has_azp: bool) -> None:
    element = torch.int8 if op == "w8a8_gemm" else torch.float8_e4m3fn
    x, weight = _empty(_M, K, dtype=element), _empty(_N, K, dtype=element)
    arrivals = _empty(dispatch.arrivals_size(_N), dtype=torch.int32)
    bias = _empty(_N, dtype=torch.bfloat16)
    if op == "fp8_block":
        groups = -(-K // tiles.BLOCK_GROUP)
        scales = _empty(_M, groups), _empty(-(-_N // tiles.BLOCK_GROUP), groups)
        dispatch.launch_block(tile, x, weight, *scales, bias, arrivals, torch.bfloat16)
        return
    azp_adj = _empty(_N, dtype=torch.int32) if has_azp_adj else None
    azp = _empty(_M, dtype=torch.int32) if has_azp else None
    vectors = (_empty(_M), _empty(_N), azp_adj, azp, bias)
    dispatch.launch(tile, x, weight, *vectors, arrivals, torch.bfloat16)


def _kernel(op: str, tile: ScaledMmTile) -> Any:
    if op != "fp8_block":
        return _KERNELS[tile.kernel]
    if tile.kernel == BLOCKS:
        return fp8_block_tall_kernel if is_tall(tile) else fp8_block_hopper_kernel
    return _BLOCK_KERNELS[tile.kernel]


def call(
    op: str,
    tile: ScaledMmTile,
    targets: tuple[str, ...],
    *,
    even_k: bool = True,
    has_azp_adj: bool = False,
    has_azp: bool = False,
) -> KernelCall:
    """Describe one call.

    Args:
        op: one of :data:`.tile.OPS`.
        tile: how the work is cut.
        targets: architectures it must compile for.
        even_k: K is a multiple of the step (``ring`` and ``pairs`` only).
        has_azp_adj: with the zero point's column term.
        has_azp: with a zero point a token.
    """
    marks = (
        (" of 256 tokens", tile.kernel == BLOCKS and is_tall(tile)),
        (" azp_adj", has_azp_adj),
        (" azp", has_azp),
        (" masked", tile.kernel in _MASKED and not even_k),
    )
    K = 4 * tile.block_k * tile.split_k + (0 if even_k else 16)
    in_parts = op == "fp8_block" and tile.kernel == BLOCKS and tile.split_k > 2
    return KernelCall(
        f"{op} {tile.kernel}{''.join(text for text, on in marks if on)}",
        _kernel(op, tile),
        tile,
        partial(_multiply, op, tile, K, has_azp_adj, has_azp),
        targets,
        _PARTS_SPILL_BYTES if in_parts else 0,
    )


def _searched() -> tuple[ScaledMmTile, ...]:
    """Return what a wide search can reach."""
    of_blocks, of_pairs = tiles.tiles_of_blocks(), tiles.tiles_of_pairs()
    apart = (tile for tile in of_blocks if tiles.most_shared_tokens(tile))
    return (
        *tiles.tiles_of_parts(),
        *tiles.tiles_of_few(),
        *of_blocks,
        *(replace(tile, split_k=2) for tile in apart),
        *of_pairs,
        *(replace(tile, early=True, prefetch=PREFETCH) for tile in of_pairs),
        *(replace(tile, split_k=2) for tile in of_pairs if tile.block_n == 64),
    )


def _every_tile(op: str) -> Iterator[tuple[ScaledMmTile, int, tuple[str, ...]]]:
    """Yield tile, K and targets: what the rule or a wide search can reach, then every table's."""
    targets = BOTH if op == "w8a8_gemm" else HOPPER
    for N, K in _RULE_SHAPES:
        for M in _RULE_TOKENS:
            yield rule.rule(op, N, K, M), K, targets
    for tile in (*rule.FED_BY_TMA, *_searched()):
        if tiles.why_not_for(tile, op, 4096) is None:
            yield tile, 4096, HOPPER
    for table in lookup.tables().values():
        for in_layer in (False, True):
            for (row_op, _, K), rows in table.choices.items():
                for _, pair in rows if row_op == op else ():
                    yield pair[in_layer].tile, K, HOPPER
    early = replace(rule.rule(op, 4096, 4096, 1), early=True, prefetch=PREFETCH)
    if tiles.why_not_for(early, op, 4096) is None:
        yield early, 4096, HOPPER


def _calls() -> Iterator[KernelCall]:
    for op in tiles.OPS:
        seen = set()
        for tile, K, targets in _every_tile(op):
            even = K % (tile.block_k * tile.split_k) == 0
            # Every tile of the rule is compiled in the masked form as well.
            for even_k in (even, False) if targets == BOTH else (even,):
                if (tile, even_k) not in seen:
                    seen.add((tile, even_k))
                    yield call(op, tile, targets, even_k=even_k)
    yield from _zero_points()


def _zero_points() -> Iterator[KernelCall]:
    ring = rule.rule("w8a8_gemm", 28672, 4096, 1)
    fed = (
        ScaledMmTile("hopper", 128, 256, 128, 4, 4),
        ScaledMmTile("turns", 128, 128, 128, 4, 6),
        *tiles.tiles_of_parts(),
        *tiles.tiles_of_few(),
        *tiles.tiles_of_pairs(),
    )
    for tile, targets in ((ring, BOTH), *((tile, HOPPER) for tile in fed)):
        for has_azp in (False, True):
            yield call("w8a8_gemm", tile, targets, has_azp_adj=True, has_azp=has_azp)


def kernel_variants() -> Iterator[KernelVariant]:
    """Yield every form of the 8-bit products' kernels."""
    return each_once(_calls())
