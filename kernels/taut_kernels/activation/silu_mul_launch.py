"""Launchers of :mod:`.silu_mul`: plans of calls, and the launch of one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from taut_kernels.activation import silu_mul_kernel as kernels
from taut_kernels.launch import launcher as launching
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.rowwise.tile_options import block_of, prepare, tile_of
from taut_kernels.rowwise.tiles import FusedTile

_pointwise = launching.Launcher(kernels.silu_mul_kernel)
_resident = launching.Launcher(kernels.silu_mul_quant_kernel)
_long = launching.Launcher(kernels.silu_mul_quant_long_kernel)


def launch(
    tile: FusedTile,
    out: str,
    x: Tensor,
    alpha: float,
    beta: float,
    limit: float | None,
    interleaved: bool,
    y: Tensor,
    scale: Tensor | None,
) -> None:
    """Run the kernel with a given tile; what the ops do after the look-up, and what tuning calls.

    Args:
        tile: how to cut the work.
        out: ``same``, ``fp8``, ``int8`` or ``static_fp8``.
        x: [M, 2N].
        alpha: as in :func:`.silu_mul.silu_mul_ref`.
        beta: likewise.
        limit: likewise.
        interleaved: likewise.
        y: [M, N], written.
        scale: [M, 1] written, one element read (``static_fp8``), or None (``same``).
    """
    (M, N), activation = y.shape, _form(alpha, beta, limit)
    call = (M, N, x.dtype, y.dtype, x.device)
    prepared = _prepared(tile, out, *call, activation, interleaved)
    run(prepared, x, alpha, beta, limit, y, scale)


def _form(alpha: float, beta: float, limit: float | None) -> str:
    """Return how the jit functions call an activation."""
    if limit is not None:
        return "clamped"
    return "silu" if alpha == 1.0 and beta == 0.0 else "free"


def _prepared(
    tile: FusedTile,
    out: str,
    M: int,
    N: int,
    dtype: torch.dtype,
    y_dtype: torch.dtype,
    device: torch.device,
    activation: str,
    interleaved: bool,
) -> launching.Prepared | None:
    """Prepare a call with a given tile; None where there is nothing to do."""
    if M == 0 or N == 0:
        return None
    block = block_of(tile, N)
    programs = -(-M // tile.rows)
    if out in ("same", "static_fp8"):
        launcher = _pointwise
        programs *= -(-N // block)
    else:
        launcher = _resident if N <= tiles_fused.RESIDENT_LIMIT else _long
    values = (N, out, activation, interleaved, tile.rows, block, tile.pdl)
    return prepare(launcher, (dtype, y_dtype), values, tile, programs, device)


# Asked in every call: kept by everything the answer follows from.
@lru_cache(maxsize=8192)
def plan(op: str, early_tokens: int, *call: Any) -> launching.Prepared | None:
    """Prepare a call of an op, by the tile the tables or their rule choose."""
    out, M, N, *types, device, alpha, beta, limit, interleaved = call
    tile, activation = tile_of(op, N, M, device), _form(alpha, beta, limit)
    return _prepared(tile, out, M, N, types[0], types[1], device, activation, interleaved)


def run(
    prepared: launching.Prepared | None,
    x: Tensor,
    alpha: float,
    beta: float,
    limit: float | None,
    y: Tensor,
    scale: Tensor | None,
) -> None:
    """Launch what was prepared, if anything; the other arguments as :func:`launch`."""
    if prepared is None:
        return
    form, grid, constants = prepared
    row = x.stride()[0]
    numbers = (x.shape[0], row, alpha, beta, 0.0 if limit is None else limit)
    form(grid, (x, y, scale), numbers, constants, (row,))
