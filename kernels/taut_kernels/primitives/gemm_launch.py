"""Launchers of the product's rungs: layouts, grid, workspace. No arithmetic, no validation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from taut_kernels.launch import launcher
from taut_kernels.primitives.gemm_direct_kernel import gemm_direct_kernel
from taut_kernels.primitives.gemm_tiled_kernel import gemm_tiled_kernel
from taut_kernels.primitives.gemm_tiles import GemmTile
from taut_kernels.primitives.gemm_tma_kernel import gemm_tma_kernel
from taut_kernels.primitives.gemm_tuned_kernel import add_splits_kernel, gemm_tuned_kernel

_DIRECT = launcher.Launcher(gemm_direct_kernel)
_TILED = launcher.Launcher(gemm_tiled_kernel)
_ADD_SPLITS = launcher.Launcher(add_splits_kernel)
ADD_BLOCK = 1024
"""Results a program of what adds the shares of a split product."""


def _tiles(M: int, N: int, tile: GemmTile) -> int:
    return -(-M // tile.block_m) * -(-N // tile.block_n)


def _options(tile: GemmTile) -> launcher.Constants:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _blocks(tile: GemmTile) -> launcher.Constants:
    return {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}


def launch_direct(tile: GemmTile, a: Tensor, b: Tensor, c: Tensor) -> None:
    """Run V1: a [M, K] and b [K, N] of any strides into c [M, N], contiguous."""
    (M, K), N = a.shape, b.shape[1]
    numbers = (M, N, K, *a.stride(), *b.stride())
    _DIRECT(
        (tile, a.dtype, numbers),
        (_tiles(M, N, tile), 1, 1),
        (a, b, c),
        numbers,
        lambda: (_blocks(tile), _options(tile)),
    )


def launch_tiled(tile: GemmTile, a: Tensor, b: Tensor, c: Tensor) -> None:
    """Run V2: a [M, K] and b [K, N] of any strides into c [M, N], contiguous."""
    (M, K), N = a.shape, b.shape[1]
    numbers = (M, N, K, *a.stride(), *b.stride())

    def constants() -> tuple[launcher.Constants, launcher.Constants]:
        even = {
            "EVEN_M": M % tile.block_m == 0,
            "EVEN_N": N % tile.block_n == 0,
            "EVEN_K": K % tile.block_k == 0,
            "GROUP_M": tile.group_m,
        }
        return even | _blocks(tile), _options(tile)

    grid = (_tiles(M, N, tile), 1, 1)
    _TILED((tile, a.dtype, numbers), grid, (a, b, c), numbers, constants)


def described(x: Tensor) -> tuple[Tensor, bool]:
    """Return ``x`` [R, C] as a tensor descriptor can take it, and whether that is its transpose.

    A descriptor needs elements next to each other along one side, and the other side's stride and
    the first address in multiples of 16 bytes. Any other matrix is copied once, rows padded.
    """
    step = launcher.ALIGNMENT // x.element_size()
    if x.data_ptr() % launcher.ALIGNMENT == 0:
        for matrix, transposed in ((x, False), (x.t(), True)):
            rows, columns = matrix.shape
            apart = matrix.stride(0) >= columns and matrix.stride(0) % step == 0
            if (matrix.stride(1) == 1 or columns == 1) and (apart or rows == 1):
                return matrix, transposed
    rows, columns = x.shape
    padded = torch.empty(rows, -(-columns // step) * step, dtype=x.dtype, device=x.device)
    return padded[:, :columns].copy_(x), False


def row_stride(matrix: Tensor) -> int:
    """Return the stride of a matrix of :func:`described`; that of a single row may be anything."""
    rows, columns = matrix.shape
    step = launcher.ALIGNMENT // matrix.element_size()
    return matrix.stride(0) if rows > 1 else -(-columns // step) * step


def _descriptor(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), [row_stride(matrix), 1], block)


def _operands(
    tile: GemmTile, a: Tensor, b: Tensor
) -> tuple[TensorDescriptor, TensorDescriptor, bool, bool]:
    a, a_transposed = described(a)
    b, b_transposed = described(b)
    block_a, block_b = [tile.block_m, tile.block_k], [tile.block_k, tile.block_n]
    return (
        _descriptor(a, block_a[::-1] if a_transposed else block_a),
        _descriptor(b, block_b[::-1] if b_transposed else block_b),
        a_transposed,
        b_transposed,
    )


def _result(tile: GemmTile, c: Tensor, parts: int) -> TensorDescriptor | None:
    """Describe c where the copy engine can store it: its rows are multiples of 16 bytes."""
    if c.shape[1] * c.element_size() % launcher.ALIGNMENT:
        return None
    return TensorDescriptor(
        c, list(c.shape), [c.shape[1], 1], [tile.block_m, tile.block_n // parts]
    )


def launch_tma(tile: GemmTile, a: Tensor, b: Tensor, c: Tensor) -> None:
    """Run V3: a [M, K] and b [K, N] of any strides into c [M, N], contiguous."""
    (M, K), N = a.shape, b.shape[1]
    a_desc, b_desc, a_transposed, b_transposed = _operands(tile, a, b)
    c_desc = _result(tile, c, 2)
    programs = min(_tiles(M, N, tile), launcher.multiprocessors(a.device))
    gemm_tma_kernel[(programs,)](
        a_desc,
        b_desc,
        c_desc,
        c,
        M,
        N,
        K,
        A_TRANSPOSED=a_transposed,
        B_TRANSPOSED=b_transposed,
        STORE_TMA=c_desc is not None,
        GROUP_M=tile.group_m,
        **_blocks(tile),
        **_options(tile),
    )


def launch_tuned(
    tile: GemmTile, a: Tensor, b: Tensor, bias: Tensor | None, activation: str, c: Tensor
) -> None:
    """Run V4.

    Args:
        tile: how to cut the work.
        a: [M, K], any strides.
        b: [K, N], any strides.
        bias: [N], or None.
        activation: ``none``, ``relu``, ``silu`` or ``gelu``.
        c: [M, N], contiguous; written.
    """
    (M, K), N = a.shape, b.shape[1]
    split = min(tile.split_k, -(-K // tile.block_k))
    a_desc, b_desc, a_transposed, b_transposed = _operands(tile, a, b)
    out = c
    if split > 1:
        out = launcher.empty((split, M, N), dtype=torch.float32, device=a.device)
    c_desc = _result(tile, c, tile.parts) if split == 1 else None
    units = _tiles(M, N, tile) * split
    programs = min(units, launcher.multiprocessors(a.device)) if tile.persistent else units
    gemm_tuned_kernel[(programs,)](
        a_desc,
        b_desc,
        c_desc,
        out,
        bias if split == 1 else None,
        M,
        N,
        K,
        A_TRANSPOSED=a_transposed,
        B_TRANSPOSED=b_transposed,
        STORE_TMA=c_desc is not None,
        HAS_BIAS=bias is not None and split == 1,
        ACTIVATION=activation if split == 1 else "none",
        SPLIT_K=split,
        PERSISTENT=tile.persistent,
        FLATTEN=tile.flatten,
        PARTS=tile.parts,
        GROUP_M=tile.group_m,
        **_blocks(tile),
        **_options(tile),
    )
    if split > 1:
        _add_splits(out, bias, activation, c)


def _add_splits(partial: Tensor, bias: Tensor | None, activation: str, c: Tensor) -> None:
    constants: Callable[[], tuple[launcher.Constants, launcher.Constants]] = lambda: (  # noqa: E731
        {
            "HAS_BIAS": bias is not None,
            "ACTIVATION": activation,
            "SPLIT_K": partial.shape[0],
            "BLOCK": ADD_BLOCK,
        },
        {"num_warps": 4},
    )
    numbers = (c.numel(), c.shape[1])
    _ADD_SPLITS(
        (c.dtype, partial.shape[0], bias is None, activation, numbers),
        (-(-c.numel() // ADD_BLOCK), 1, 1),
        (partial, bias, c),
        numbers,
        constants,
    )
