"""The kernel of `taut::w4a16_gemm` for thousands of tokens: dequantise, then multiply densely.

Maths     as :mod:`.op`; the product is cuBLAS'
Numerics  (q - z) · s is rounded once to the dtype of ``x``; fp32 accumulation
Limits    as :mod:`.op`; needs up to ``SLICE_BYTES`` of scratch memory
Source    Reading the dense weights costs little beside thousands of tokens' products
          (vLLM's ``VLLM_MARLIN_LARGE_M_BF16``, read for the idea)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from taut_kernels.gemm.w4a16.dense_kernel import w4a16_dequantize_kernel
from taut_kernels.gemm.w4a16.plan import ELEMENT, Call, Weight
from taut_kernels.launch import launcher

SLICE_BYTES = 256 * 2**20
"""Dense weights held at once; a layer with more is done in slices of output features."""
_SLICE_STEP = 16
"""Tiles of 16 features: 256 of them, whole tiles of cuBLAS."""
WARPS = 4
CHUNKS_PER_PROGRAM = 8
_DEQUANTIZE = launcher.Launcher(w4a16_dequantize_kernel)


def dequantize(weight: Weight, group_size: int, first_tile: int, tiles: int) -> Tensor:
    """Return rows of the dense weight.

    Args:
        weight: the layer's; bias and arrivals are not used.
        group_size: G.
        first_tile: first 16-row tile.
        tiles: how many of them.

    Returns:
        [16 · tiles, K] in the dtype of the scales, each value rounded once.
    """
    qweight, scales, zeros, _, _ = weight
    K = 64 * qweight.shape[1]
    dense = launcher.empty((16 * tiles, K), dtype=scales.dtype, device=scales.device)

    def constants() -> tuple[launcher.Constants, launcher.Constants]:
        named = {
            "K": K,
            "GROUP_SIZE": 0 if group_size == K else group_size,
            "HAS_ZEROS": zeros is not None,
            "ELEMENT": ELEMENT[scales.dtype],
            "CHUNKS_PER_PROGRAM": CHUNKS_PER_PROGRAM,
            "WARPS": WARPS,
        }
        return named, {"num_warps": WARPS}

    _DEQUANTIZE(
        (K, group_size, scales.dtype, zeros is None, tiles % 16 == 0, tiles == 1),
        (-(-tiles // WARPS), -(-(K // 64) // CHUNKS_PER_PROGRAM), 1),
        (qweight, scales, zeros, dense),
        (first_tile, tiles),
        constants,
    )
    return dense


@dataclass(frozen=True, slots=True)
class Plan:
    """A call in slices of the layer's rows.

    Attributes:
        call: what it was planned for.
    """

    call: Call

    def run(self, x: Tensor, weight: Weight) -> Tensor:
        """As of :class:`.plan.Runs`."""
        M, N, K, group_size, dtype, device, _, _ = self.call
        tiles, bias = N // 16, weight.bias
        y = launcher.empty((M, N), dtype=dtype, device=device)
        step = _slice_tiles(tiles, 16 * K * dtype.itemsize)
        for first in range(0, tiles, step):
            count = min(step, tiles - first)
            part = dequantize(weight, group_size, first, count)
            rows = slice(16 * first, 16 * (first + count))
            _linear(x, part, None if bias is None else bias[rows], y[:, rows])
        return y


def _slice_tiles(tiles: int, tile_bytes: int) -> int:
    """Return how many tiles a slice has: slices of about one size, or the last is a sliver."""
    most = max(1, SLICE_BYTES // tile_bytes)
    even = -(-tiles // -(-tiles // most))
    return min(most, -(-even // _SLICE_STEP) * _SLICE_STEP)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Multiply in the types given (`torch.nn.functional.linear` would take autocast's) into ``y``.

    A slice of columns is written where it belongs: cuBLAS takes rows that lie further apart.
    """
    if bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)
