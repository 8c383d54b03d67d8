"""What calls of the 8-bit kernels fed by `cp.async` are made of, whichever kernel it is."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from taut_kernels.gemm.scaled_mm.tile import ScaledMmTile

Operands = tuple[
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor | None,
    Tensor | None,
    Tensor | None,
]
"""Of a product with scales per tensor, token or channel, M ≥ 1: x [M, K] int8 or e4m3, weight
[N, K] as x, N % 8 == 0, rows of both 16-byte aligned; x_scale [M] or one element and weight_scale
[N] or one, fp32; azp_adj [N] and azp [M] int32, bias [N], or None."""


BlockOperands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Of a product with scales per 128×128 block of weights, M ≥ 1: x [M, K] and weight [N, K] e4m3,
N % 8 == 0, rows of both 16-byte aligned; x_scale [M, ceil(K/128)] fp32, any strides; weight_scale
[ceil(N/128), ceil(K/128)] fp32, stride 1 along K; bias [N] or None."""
Meeting = tuple[Tensor | None, Tensor | None]
"""Room for the parts of sums, as many as ``split_k`` a tile, and a zero for every place where they
meet; twice None where K is not split."""


def form_key(tile: ScaledMmTile, x: Tensor, weight: Tensor, y: Tensor, *absent: bool) -> Hashable:
    """Tell apart what Triton compiles apart; rows of ``x`` and ``weight`` are aligned by now.

    Args:
        tile: how the work is cut.
        x: [M, K].
        weight: [N, K].
        y: [M, N].
        absent: which of the kernel's optional vectors are None.
    """
    wide = x.stride(0) >> 31, weight.stride(0) >> 31
    return (tile, *weight.shape, x.dtype, y.dtype, wide, absent)


def block_arguments(
    operands: BlockOperands, meeting: Meeting, y: Tensor
) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """Return tensors and integers of a kernel of blocks of weights fed by `cp.async`, in its order.

    Args:
        operands: of the product.
        meeting: of its parts.
        y: [M, N].
    """
    x, weight, x_scale, weight_scale, _ = operands
    (M, K), N = x.shape, weight.shape[0]
    scales = x_scale.stride(0), x_scale.stride(1), weight_scale.stride(0)
    return (*operands, y, *meeting), (M, *scales, N, K, x.stride(0), weight.stride(0))
