"""The regime of `taut::w4a16_gemm` for at most 16 tokens: bound by weight bytes.

Maths     as :mod:`taut_kernels.gemm.w4a16`
Numerics  q - z is an integer and exact in either type; products accumulate in fp32 within a group,
          scale and bias are applied in fp32, one rounding at the store. For one tile, the same bits
          from run to run: K-warps and splits are added in a fixed order.
Limits    as :mod:`taut_kernels.gemm.w4a16`, M ≤ 16
Source    `mma.m16n8k16` with weights as the 16-row operand, so that tokens pad to 8 and not to 64.
          The rest is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from taut_kernels import _launch, tiles_decode
from taut_kernels.gemm._w4a16_decode_jit import w4a16_decode_kernel

MAX_M = 16
_KERNEL = _launch.Launcher(w4a16_decode_kernel)
_ELEMENT = {torch.bfloat16: "bf16", torch.float16: "f16"}


def launch_constants(
    tile: tiles_decode.DecodeTile, K: int, token_tiles: int, group_size: int, *, pdl: bool
) -> dict[str, int | bool]:
    """Return the kernel constants that follow from tile and shape.

    Args:
        tile: how to cut the work.
        K: input features.
        token_tiles: 1 for M ≤ 8, 2 for M ≤ 16.
        group_size: G, or 0 for one group a channel.
        pdl: the card has programmatic dependent launch.
    """
    return {
        "PDL": pdl,
        "K": K,
        "GROUP_SIZE": group_size,
        "TOKEN_TILES": token_tiles,
        "ROW_WARPS": tile.row_warps,
        "K_WARPS": tile.k_warps,
        "SPLIT_K": tile.split_k,
        "DEPTH": tile.depth,
        "X_DEPTH": tile.x_depth,
        "BATCH": tile.batch,
        "FENCE": tile.fence,
    }


@dataclass(frozen=True, slots=True)
class Plan:
    """What shapes, types and the tile determine of a call. Holds no tensor.

    Attributes:
        form: of the kernel.
        constants: what the form is compiled with.
        device: of operands and result.
        dtype: of activations and result.
        N: output features.
        grid: programs.
        sums: fp32 numbers that programs which share an output exchange; 0 where none do.
    """

    form: _launch.Form
    constants: Callable[[], tuple[_launch.Constants, _launch.Constants]]
    device: torch.device
    dtype: torch.dtype
    N: int
    grid: tuple[int, int, int]
    sums: int

    def run(
        self,
        x: torch.Tensor,
        qweight: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        arrivals: torch.Tensor,
    ) -> torch.Tensor:
        """Multiply; operands as of :func:`launch`, of the shapes and types of the plan."""
        M, stride = x.shape[0], x.stride(0)
        y = _launch.empty((M, self.N), dtype=self.dtype, device=self.device)
        partial, meet = None, None
        if self.sums:
            partial = _launch.empty((self.sums,), dtype=torch.float32, device=self.device)
            meet = arrivals
        self.form(
            self.grid,
            (x, qweight, scales, zeros, bias, y, partial, meet),
            (M, self.N, stride),
            self.constants,
            (stride,),
        )
        return y


def plan(
    tile: tiles_decode.DecodeTile,
    shape: tuple[int, int, int],
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_zeros: bool,
    has_bias: bool,
) -> Plan:
    """Prepare calls of one shape.

    Args:
        tile: how to cut the work.
        shape: M, N, K.
        group_size: G.
        dtype: of the activations.
        device: with its number.
        has_zeros: with zero points.
        has_bias: with a bias.
    """
    M, N, K = shape
    token_tiles = 1 if M <= 8 else 2
    row_tiles = min(tile.row_tiles, N // 16)
    programs = -(-N // (16 * row_tiles * tile.row_warps))

    def constants() -> tuple[_launch.Constants, _launch.Constants]:
        pdl = _launch.is_hopper(device)
        group = 0 if group_size == K else group_size
        named = launch_constants(tile, K, token_tiles, group, pdl=pdl) | {
            "HAS_ZEROS": has_zeros,
            "HAS_BIAS": has_bias,
            "ELEMENT": _ELEMENT[dtype],
            "ROW_TILES": row_tiles,
        }
        options = {"num_warps": tile.num_warps, "maxnreg": tile.registers or None}
        return named, options | _launch.PDL_OPTIONS[pdl]

    index = -1 if device.index is None else device.index
    form = _KERNEL.form((tile, N, K, token_tiles, group_size, dtype, has_zeros, has_bias), index)
    sums = 0
    if tile.split_k > 1:
        sums = programs * tile.split_k * token_tiles * 8 * 16 * row_tiles * tile.row_warps
    return Plan(form, constants, device, dtype, N, (programs, tile.split_k, 1), sums)


def launch(
    tile: tiles_decode.DecodeTile,
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor,
    group_size: int,
) -> torch.Tensor:
    """Run the kernel with a given tile, as tuning does; the op keeps its plans.

    Args:
        tile: how to cut the work.
        x: [M, K], 1 ≤ M ≤ 16, rows 16-byte aligned.
        qweight: as in the contract of :mod:`taut_kernels.gemm.w4a16`.
        scales: likewise.
        zeros: likewise.
        bias: likewise.
        arrivals: likewise.
        group_size: G.

    Returns:
        [M, N].
    """
    shape = (x.shape[0], 16 * qweight.shape[0], x.shape[1])
    given = {"has_zeros": zeros is not None, "has_bias": bias is not None}
    planned = plan(tile, shape, group_size, x.dtype, x.device, **given)
    return planned.run(x, qweight, scales, zeros, bias, arrivals)
