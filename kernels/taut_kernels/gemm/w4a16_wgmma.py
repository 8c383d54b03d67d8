"""The regime of `taut::w4a16_gemm` for many tokens: weights in registers, operand A of `wgmma`.

Maths     as :mod:`taut_kernels.gemm.w4a16`
Numerics  (q - z) · s is rounded once to the dtype of ``x`` before the product (the decode regime
          does not); products accumulate in fp32 over all of K. For one tile, the same bits from run
          to run: splits are added in a fixed order.
Limits    as :mod:`taut_kernels.gemm.w4a16`; (q - z) · s must be finite in the dtype of ``x``
Source    Weights as the 64-row register operand of `wgmma`, tokens as its columns, so that few
          tokens do not pad to 64: the idea of Triton's MXFP4 kernels for Hopper
          (triton-lang/triton, PR 6833). The rest is ours.
"""

from __future__ import annotations

from typing import Literal

import torch

from taut_kernels import _launch
from taut_kernels.gemm._w4a16_wgmma_jit import reorder_kernel, w4a16_wgmma_kernel
from taut_kernels.tiles_wgmma import WgmmaTile

ELEMENT = {torch.bfloat16: "bf16", torch.float16: "f16"}
Role = Literal["alone", "head", "tail"]
"""Of a launch: the only one, or one of two (:mod:`taut_kernels.gemm.w4a16_wgmma_waves`)."""
_REORDER_BLOCK = 2048
_PRODUCT = _launch.Launcher(w4a16_wgmma_kernel)
_REORDER = _launch.Launcher(reorder_kernel)


def launch_constants(
    tile: WgmmaTile, K: int, group_size: int, *, hopper: bool, role: Role = "alone"
) -> dict[str, int | bool | str]:
    """Return the kernel constants that follow from tile and shape.

    Args:
        tile: how to cut the work.
        K: input features.
        group_size: G, or 0 for one group a channel.
        hopper: the card has `wgmma`, whose products go on after they were issued, and programmatic
            dependent launch.
        role: of this launch.
    """
    return {
        "K": K,
        "GROUP_SIZE": group_size,
        "BLOCK_M": tile.block_m,
        "REPS": tile.row_reps,
        "CHUNKS_PER_STEP": 1 if (K // 64) % 2 else tile.chunks_per_step,
        "SPLIT_K": tile.split_k,
        "REORDERED": tile.reordered,
        "EARLY_WAIT": tile.early_wait and hopper,
        "AHEAD": tile.ahead,
        "PDL": hopper,
        "WARPS": tile.num_warps,
        "STAGES": tile.num_stages,
        "ROLE": role,
    }


def reorder(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [M, K] with its columns in fragment order, contiguous."""
    M, K = x.shape
    out = _launch.empty((M, K), dtype=x.dtype, device=x.device)

    def constants() -> tuple[_launch.Constants, _launch.Constants]:
        pdl = _launch.is_hopper(x.device)
        return {"BLOCK": _REORDER_BLOCK, "PDL": pdl}, dict(_launch.PDL_OPTIONS[pdl])

    _REORDER(
        (K, x.dtype),
        (M, -(-K // _REORDER_BLOCK), 1),
        (x, out),
        (K, x.stride(0)),
        constants,
        (x.stride(0),),
    )
    return out


def launch(
    tile: WgmmaTile,
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor,
    group_size: int,
) -> torch.Tensor:
    """Run the kernel with a given tile; what the op does after the look-up, and what tuning calls.

    Args:
        tile: how to cut the work.
        x: [M, K], M ≥ 1, rows 16-byte aligned.
        qweight: as in the contract of :mod:`taut_kernels.gemm.w4a16`.
        scales: likewise.
        zeros: likewise.
        bias: likewise.
        arrivals: likewise.
        group_size: G.

    Returns:
        [M, N].

    Raises:
        ValueError: the tile makes more partial sums meet than ``arrivals`` counts.
    """
    y = _launch.empty((x.shape[0], 16 * qweight.shape[0]), dtype=x.dtype, device=x.device)
    if tile.reordered:
        x = reorder(x)
    product(tile, x, qweight, scales, zeros, bias, arrivals, group_size, y)
    return y


def product(
    tile: WgmmaTile,
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor,
    group_size: int,
    y: torch.Tensor,
    role: Role = "alone",
) -> None:
    """Fill ``y``, which may be some columns of a larger result.

    Args:
        tile: how to cut the work.
        x: [M, K], in fragment order where the tile says so.
        qweight: of the output features of ``y``, as are the next three.
        scales: likewise.
        zeros: likewise.
        bias: likewise.
        arrivals: the layer's.
        group_size: G.
        y: [M, rows], the result's rows apart; parts of it are whole tiles.
        role: of this launch.

    Raises:
        ValueError: the tile makes more partial sums meet than ``arrivals`` counts.
    """
    M, K = x.shape
    rows = 16 * qweight.shape[0]
    N = y.stride(0)
    grid = (-(-rows // tile.rows), tile.split_k, -(-M // tile.block_m))
    partial = None
    if tile.split_k > 1:
        tiles = grid[0] * grid[2]
        if tiles > arrivals.numel():
            raise ValueError(f"split_k: {tiles} tiles meet, arrivals counts {arrivals.numel()}")
        size = tiles * tile.split_k * tile.rows * tile.block_m
        partial = _launch.empty((size,), dtype=torch.float32, device=x.device)

    def constants() -> tuple[_launch.Constants, _launch.Constants]:
        hopper = _launch.is_hopper(x.device)
        group = 0 if group_size == K else group_size
        named = launch_constants(tile, K, group, hopper=hopper, role=role) | {
            "HAS_ZEROS": zeros is not None,
            "HAS_BIAS": bias is not None,
            "ELEMENT": ELEMENT[x.dtype],
        }
        return named, {"num_warps": tile.num_warps} | _launch.PDL_OPTIONS[hopper]

    _PRODUCT(
        (tile, N, K, group_size, x.dtype, zeros is None, bias is None, role),
        grid,
        (x, qweight, scales, zeros, bias, y, partial, arrivals if tile.split_k > 1 else None),
        (M, N, x.stride(0)),
        constants,
        (x.stride(0),),
    )
