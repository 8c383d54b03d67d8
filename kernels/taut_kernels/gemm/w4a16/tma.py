"""Launches the `wgmma` ring kernel whose stages TMA fills.

Regime, maths and numerics: :mod:`.ring`, whose tiles with ``tma`` this
runs. A product takes all of a layer's features, at least a tile's rows, or some that are whole
tiles (:mod:`.pair`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from taut_kernels.gemm.w4a16.plan import Call, Weight
from taut_kernels.gemm.w4a16.ring_tile import WgmmaRingTile, require_meeting_places
from taut_kernels.gemm.w4a16.tma_kernel import w4a16_wgmma_tma_kernel
from taut_kernels.launch import launcher
from taut_kernels.launch.descriptors import Describe

WORD_LAYOUT = gl.NVMMASharedLayout(128, 32, 3)
TOKEN_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)
"""Of weights and activations in shared memory: rows of 128 bytes, swizzled."""
_KERNEL = launcher.Launcher(w4a16_wgmma_tma_kernel)


def word_block(tile: WgmmaRingTile) -> list[int]:
    """Return the block of weights a step of a tile takes: row tiles, quarters of chunks, words."""
    return [tile.rows // 16, 4 * tile.chunks_per_step, 32]


@dataclass(frozen=True, slots=True)
class FedProduct:
    """One launch of the kernel, which takes descriptors of activations and weights.

    Attributes:
        form: of the kernel.
        constants: what the form is compiled with.
        call: what it was planned for.
        rows: output features it computes.
        tokens: describes activations.
        words: describes weights.
        grid: programs along features, splits and tokens; the last with the first where the tile
            groups blocks of tokens.
        sums: fp32 numbers that programs which share an output exchange; 0 where none do.
    """

    form: launcher.Form
    constants: Callable[[], tuple[launcher.Constants, launcher.Constants]]
    call: Call
    rows: int
    tokens: Describe
    words: Describe
    grid: tuple[int, int, int]
    sums: int

    def __call__(self, x: Tensor, weight: Weight, y: Tensor) -> Tensor | None:
        """As of :class:`.plan.Fills`."""
        qweight, scales, zeros, bias, arrivals = weight
        (M, K), N, partial = x.shape, self.call.N, None
        if self.sums:
            partial = launcher.empty((self.sums,), dtype=torch.float32, device=x.device)
        # The stride of one row means nothing, but has to be a valid one.
        step = x.stride(0) if M > 1 else K
        self.form(
            self.grid,
            (scales, zeros, bias, y, partial, arrivals if self.sums else None),
            (
                self.tokens(x, [M, K], [step, 1]),
                self.words(qweight, [self.rows // 16, K // 16, 32], [2 * K, 32, 1]),
                M,
                N,
            ),
            self.constants,
        )
        return partial


def product(tile: WgmmaRingTile, call: Call, rows: int) -> FedProduct:
    """Prepare the product of all output features, or of some that are whole tiles.

    Args:
        tile: how to cut the work, with ``tma``.
        call: what to prepare for.
        rows: how many of its features.

    Raises:
        ValueError: the layer has fewer features than the tile, or the tile makes more partial sums
            meet than ``arrivals`` counts.
    """
    if tile.rows > call.N:
        raise ValueError(f"{tile} takes {tile.rows} features at least, got {call.N}")
    blocks = -(-rows // tile.rows), -(-call.M // tile.block_m)
    grid = (blocks[0], tile.split_k, blocks[1])
    if tile.group_m:
        grid = (blocks[0] * blocks[1], tile.split_k, 1)
    sums = 0
    if tile.split_k > 1:
        require_meeting_places(grid[0] * grid[2], call.N)
        sums = grid[0] * grid[1] * grid[2] * tile.rows * tile.block_m

    def constants() -> tuple[launcher.Constants, launcher.Constants]:
        cut = tile.cut(call.group, has_zeros=call.has_zeros)
        named = {"CUT": cut} | call.constants
        options = {"num_warps": tile.num_warps, "maxnreg": tile.registers or None}
        return named, options | launcher.PDL_OPTIONS[True]

    form = _KERNEL.form((tile, call.form), call.device_number)
    tokens = Describe([tile.block_m // tile.pieces, 64], TOKEN_LAYOUT)
    words = Describe(word_block(tile), WORD_LAYOUT)
    return FedProduct(form, constants, call, rows, tokens, words, grid, sums)
