"""Launchers of the 8-bit products: alignment, grid, workspace. No arithmetic, no validation."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from taut_kernels.gemm.scaled_mm.blocks_hopper import launch_blocks
from taut_kernels.gemm.scaled_mm.blocks_pairs import launch_block_pairs
from taut_kernels.gemm.scaled_mm.blocks_portable_kernel import fp8_block_kernel
from taut_kernels.gemm.scaled_mm.call import Meeting, Operands, block_arguments, form_key
from taut_kernels.gemm.scaled_mm.few import launch_few
from taut_kernels.gemm.scaled_mm.hopper import ROWS, launch_hopper
from taut_kernels.gemm.scaled_mm.pairs import launch_pairs
from taut_kernels.gemm.scaled_mm.portable_kernel import scaled_mm_kernel
from taut_kernels.gemm.scaled_mm.tile import BLOCKS, PAIRS, ScaledMmTile
from taut_kernels.launch import launcher

ALIGNMENT = launcher.ALIGNMENT
"""Also what `cp.async` moves at once, and what a tensor descriptor demands of rows."""
_LEAST_BLOCK_N = 64
_RING = launcher.Launcher(scaled_mm_kernel)
_BLOCK = launcher.Launcher(fp8_block_kernel)


def make_arrivals(N: int, device: torch.device) -> Tensor:
    """Allocate a layer's ``arrivals``, int32 zeros, kept as long as the layer.

    Returns:
        [2 · ceil(N/64)].
    """
    return torch.zeros(arrivals_size(N), dtype=torch.int32, device=device)


def arrivals_size(N: int) -> int:
    """Return the elements of ``arrivals``: for two tiles of tokens, of 64 features at least."""
    return 2 * -(-N // _LEAST_BLOCK_N)


def _prepared(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x`` with rows the kernels can read; refuse weights they cannot."""
    if weight.data_ptr() % ALIGNMENT:
        raise ValueError(f"weight must start at an address aligned to {ALIGNMENT} bytes")
    return launcher.aligned(x)


def _options(tile: ScaledMmTile) -> launcher.Constants:
    """Return the compiler's options."""
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _constants(tile: ScaledMmTile, K: int) -> launcher.Constants:
    """Return the constants every ring kernel has."""
    return {
        "EVEN_K": K % (tile.block_k * tile.split_k) == 0,
        "SPLIT_K": tile.split_k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }


def _meeting(
    tile: ScaledMmTile, places: int, each: int, x: Tensor, arrivals: Tensor | None
) -> Meeting:
    """Return where the parts of sums meet, ``each`` of them in a place."""
    if tile.split_k == 1:
        return None, None
    if arrivals is None or arrivals.numel() < places:
        raise ValueError(f"arrivals must hold {places} elements for this shape, from make_arrivals")
    kind = torch.int32 if x.dtype is torch.int8 else torch.float32
    room = (places * tile.split_k * each,)
    return launcher.empty(room, dtype=kind, device=x.device), arrivals


# Asked in every call: kept by everything the answer follows from.
@lru_cache(maxsize=8192)
def _prepared_ring(
    tile: ScaledMmTile,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    wide: tuple[int, int],
    has_azp_adj: bool,
    has_azp: bool,
    has_bias: bool,
    device: torch.device,
) -> launcher.Prepared:
    """Prepare a call of the ring kernel; ``wide`` as of :func:`form_key`."""

    def constants() -> tuple[launcher.Constants, launcher.Constants]:
        named = {
            "HAS_AZP_ADJ": has_azp_adj,
            "HAS_AZP": has_azp,
            "HAS_BIAS": has_bias,
            "BLOCK_K": tile.block_k,
            "EARLY": tile.early,
            "PREFETCH": tile.prefetch,
        }
        return named | _constants(tile, K), _options(tile) | launcher.PDL_OPTIONS[tile.early]

    absent = (not has_azp_adj, not has_azp, not has_bias)
    form = _RING.form((tile, N, K, dtype, out_dtype, wide, absent), launcher.number(device))
    grid = (-(-M // tile.block_m), -(-N // tile.block_n), tile.split_k)
    return launcher.Prepared(form, grid, constants)


def _launch_ring(
    tile: ScaledMmTile, operands: Operands, arrivals: Tensor | None, y: Tensor
) -> None:
    x, weight, x_scale, weight_scale, azp_adj, azp, bias = operands
    (M, K), N = x.shape, weight.shape[0]
    x_row, weight_row = x.stride()[0], weight.stride()[0]
    given = azp_adj is not None, azp is not None, bias is not None
    wide = x_row >> 31, weight_row >> 31
    form, grid, constants = _prepared_ring(tile, M, N, K, x.dtype, y.dtype, wide, *given, x.device)
    meeting = _meeting(tile, grid[0] * grid[1], tile.block_m * tile.block_n, x, arrivals)
    by_row, by_column = int(x_scale.numel() > 1), int(weight_scale.numel() > 1)
    form(
        grid,
        (x, weight, x_scale, weight_scale, azp_adj, azp, bias, y, *meeting),
        (M, by_row, by_column, N, K, x_row, weight_row),
        constants,
    )


def launch(
    tile: ScaledMmTile,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    azp_adj: Tensor | None,
    azp: Tensor | None,
    bias: Tensor | None,
    arrivals: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Run a product with scales per tensor, token or channel; what tuning calls, too.

    Args:
        tile: how to cut the work.
        x: [M, K] int8 or e4m3.
        weight: [N, K] as ``x``; rows 16-byte aligned.
        x_scale: [M] or one element, fp32.
        weight_scale: [N] or one element, fp32.
        azp_adj: [N] int32 or None.
        azp: [M] int32 or None.
        bias: [N] or None.
        arrivals: of :func:`make_arrivals`; needed where ``tile.split_k`` > 1.
        out_dtype: of the result.

    Returns:
        [M, N].

    Raises:
        ValueError: the tile splits K and ``arrivals`` is missing or too small; or the weights'
            first row is not 16-byte aligned.
    """
    M, N = x.shape[0], weight.shape[0]
    y = launcher.empty((M, N), dtype=out_dtype, device=x.device)
    if M == 0:
        return y
    x = _prepared(x, weight)
    operands = (x, weight, x_scale, weight_scale, azp_adj, azp, bias)
    if tile.kernel == "ring":
        _launch_ring(tile, operands, arrivals, y)
    elif tile.kernel in ("few", PAIRS):
        programs = -(-M // tile.block_m) * -(-N // tile.block_n)
        meeting = _meeting(tile, programs, tile.block_m * tile.block_n, x, arrivals)
        run = launch_few if tile.kernel == "few" else launch_pairs
        run(tile, operands, meeting, y)
    else:
        launch_hopper(tile, operands, y)
    return y


def launch_block(
    tile: ScaledMmTile,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    arrivals: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Run a product with one scale a 128×128 block of weights and 128 activations of a token.

    Args:
        tile: how to cut the work; ``kernel`` ring or blocks, ``block_k`` 128, or pairs, 256.
        x: [M, K] e4m3.
        weight: [N, K] e4m3; rows 16-byte aligned.
        x_scale: [M, ceil(K/128)] fp32, any strides; ``blocks`` is 10 to 15 % faster where tokens
            are contiguous, as vLLM's quantisation has them for CUTLASS and DeepGEMM.
        weight_scale: [ceil(N/128), ceil(K/128)] fp32, stride 1 along K.
        bias: [N] or None.
        arrivals: as for :func:`launch`.
        out_dtype: of the result.

    Returns:
        [M, N].

    Raises:
        ValueError: as :func:`launch`.
    """
    (M, K), N = x.shape, weight.shape[0]
    y = launcher.empty((M, N), dtype=out_dtype, device=x.device)
    if M == 0:
        return y
    x = _prepared(x, weight)
    operands = (x, weight, x_scale, weight_scale, bias)
    if tile.kernel == BLOCKS:
        parts = tile.block_m // ROWS * -(-M // tile.block_m) * -(-N // tile.block_n)
        meeting = _meeting(tile, parts, ROWS * tile.block_n, x, arrivals)
        launch_blocks(tile, operands, meeting, y)
        return y
    grid = (-(-M // tile.block_m), -(-N // tile.block_n), tile.split_k)
    meeting = _meeting(tile, grid[0] * grid[1], tile.block_m * tile.block_n, x, arrivals)
    if tile.kernel == PAIRS:
        launch_block_pairs(tile, operands, meeting, y)
        return y

    def constants() -> tuple[launcher.Constants, launcher.Constants]:
        return {"HAS_BIAS": bias is not None} | _constants(tile, K), _options(tile)

    tensors, integers = block_arguments(operands, meeting, y)
    _BLOCK(form_key(tile, x, weight, y, bias is None), grid, tensors, integers, constants)
    return y
