"""Symmetric 8-bit quantisation of rows (tokens) alone, where nothing of ours is in front of it.

Maths     q, s with x ≈ q · s, one s a row, as :mod:`taut_kernels.rowwise.row_quant` defines them
Op        `taut::row_quant` → q, scales
Shapes    x [M, N] bf16|fp16|fp32, rows at any stride, columns next to each other
          → q [M, N] float8_e4m3fn|int8 and scales [M, 1] fp32; both contiguous
Numerics  fp32. The bits that `taut::rms_norm_quant` and `taut::silu_mul_quant` give for an equal
          y, with every tile and from run to run: a maximum has no order
vLLM      fp8: the scales and values of `dynamic_per_token_scaled_fp8_quant`, zeros up to their
          sign. int8: `dynamic_scaled_int8_quant` has no least scale: a row of zeros has scale 0
          there and 2**-23 here, and is zeros times it either way; a row with no |x| of 127 · 2**-23
          or more has steps of 2**-23 here and finer ones there. It multiplies by 127 / max|x|, here
          by 1 / s, one rounding apart: a value next to the middle between two steps may take the
          other one. All other scales are equal.
CPU       the reference, in plain torch: the specification
Limits    N ≤ 262144; forward only; sm_80 and later, fp8 sm_89 and later
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch import early_start
from taut_kernels.launch import launcher as launching
from taut_kernels.launch.op_registration import register_op
from taut_kernels.rowwise import row_quant as definition
from taut_kernels.rowwise.quantize_kernel import row_quant_kernel, row_quant_long_kernel
from taut_kernels.rowwise.rows import as_rows
from taut_kernels.rowwise.tile_options import prepare_rows, tile_of
from taut_kernels.rowwise.tiles import FusedTile

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_N = 262144
_LAUNCHERS = (launching.Launcher(row_quant_kernel), launching.Launcher(row_quant_long_kernel))


def launch(tile: FusedTile, out: str, x: Tensor, y: Tensor, scales: Tensor) -> None:
    """Run the kernel with a given tile; what the op does after the look-up, and what tuning calls.

    Args:
        tile: how to cut the work.
        out: ``fp8`` or ``int8``.
        x: [M, N].
        y: [M, N], written.
        scales: [M, 1], written.
    """
    _run(_prepared(tile, out, *y.shape, x.dtype, y.dtype, x.device), x, y, scales)


def _prepared(
    tile: FusedTile, out: str, M: int, N: int, *types_and_device: Any
) -> launching.Prepared | None:
    *types, device = types_and_device
    return prepare_rows(_LAUNCHERS, tile, out, (M, N), tuple(types), device)


# Asked in every call: kept by everything the answer follows from.
@lru_cache(maxsize=8192)
def _plan(early_tokens: int, *call: Any) -> launching.Prepared | None:
    """Prepare a call of the op, by the tile the tables or their rule choose."""
    M, N, _, y_dtype, device = call
    return _prepared(tile_of("row_quant", N, M, device), definition.OUT[y_dtype], *call)


def _run(prepared: launching.Prepared | None, x: Tensor, y: Tensor, scales: Tensor) -> None:
    if prepared is None:
        return
    form, grid, constants = prepared
    row = x.stride()[0]
    form(grid, (x, y, scales), (x.shape[0], row), constants, (row,))


def _launch_row_quant(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    (M, N), device = x.shape, x.device
    q = launching.empty((M, N), dtype=dtype, device=device)
    scales = launching.empty((M, 1), dtype=torch.float32, device=device)
    _run(_plan(early_start.EARLY_TOKENS, M, N, x.dtype, dtype, device), x, q, scales)
    return q, scales


def _fake_row_quant(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = x.new_empty((x.shape[0], 1), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scales


_SCHEMA = "taut::row_quant(Tensor x, ScalarType dtype) -> (Tensor, Tensor)"
register_op(_SCHEMA, definition.quantize_rows_ref, _launch_row_quant, _fake_row_quant)


def row_quant(x: Tensor, *, dtype: torch.dtype = definition.FP8) -> tuple[Tensor, Tensor]:
    """Quantise rows by their largest magnitudes.

    Args:
        x: [..., N] bf16, fp16 or fp32; rows at one stride, columns next to each other.
        dtype: `torch.float8_e4m3fn` or `torch.int8`.

    Returns:
        Values [..., N] of ``dtype`` and scales [..., 1] fp32; x ≈ values · scales.

    Raises:
        ValueError: a shape, dtype or layout the contract does not allow, or a format the device
            does not have; names the argument.
    """
    rows = as_rows("x", x, DTYPES, MAX_N)
    if reason := definition.why_not_supported(dtype, x.device):
        raise ValueError(reason)
    q, scales = torch.ops.taut.row_quant.default(rows, dtype)
    return q.view(x.shape), scales.view(*x.shape[:-1], 1)
