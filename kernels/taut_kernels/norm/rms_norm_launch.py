"""Launcher of :mod:`.rms_norm`: calls, their plans, and the launch of one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch import launcher as launching
from taut_kernels.norm.rms_norm_kernel import rms_norm_kernel, rms_norm_long_kernel
from taut_kernels.rowwise.tile_options import prepare_rows, tile_of
from taut_kernels.rowwise.tiles import FusedTile

_LAUNCHERS = (launching.Launcher(rms_norm_kernel), launching.Launcher(rms_norm_long_kernel))


def launch(
    tile: FusedTile,
    out: str,
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    epsilon: float,
    y: Tensor,
    scale: Tensor | None,
) -> None:
    """Run the kernel with a given tile; what the ops do after the look-up, and what tuning calls.

    Args:
        tile: how to cut the work; rows beyond `RESIDENT_LIMIT` columns need ``rows`` 1.
        out: ``same``, ``fp8``, ``int8`` or ``static_fp8``.
        x: [M, N].
        weight: [N] or None.
        residual: [M, N] or None; updated.
        epsilon: added to the mean square.
        y: [M, N], written.
        scale: [M, 1] written, one element read (``static_fp8``), or None (``same``).
    """
    prepared = _prepared(tile, call_of(out, x, weight, residual, y))
    run(prepared, x, weight, residual, epsilon, y, scale)


Call = tuple[str, int, int, torch.dtype, torch.dtype, torch.dtype | None, bool, torch.device]
"""All of a call but its tensors, their strides and epsilon: ``out``, M, N, the types of ``x``,
``y`` and ``weight``, whether there is a residual, and the device."""


def call_of(out: str, x: Tensor, weight: Tensor | None, residual: Tensor | None, y: Tensor) -> Call:
    """Return all of a call that its plan follows from; arguments as :func:`launch`."""
    M, N = x.shape
    weight_dtype = None if weight is None else weight.dtype
    return out, M, N, x.dtype, y.dtype, weight_dtype, residual is not None, x.device


def _prepared(tile: FusedTile, call: tuple[Any, ...]) -> launching.Prepared | None:
    """Prepare a call, of :func:`call_of`, with a given tile; None where there is nothing to do."""
    out, M, N, dtype, y_dtype, weight_dtype, adds, device = call
    types = (dtype, y_dtype, weight_dtype, not adds)
    return prepare_rows(_LAUNCHERS, tile, out, (M, N), types, device)


# Asked in every call: kept by everything the answer follows from.
@lru_cache(maxsize=8192)
def plan(op: str, early_tokens: int, *call: Any) -> launching.Prepared | None:
    """Prepare a call of an op, by the tile the tables or their rule choose."""
    _, M, N, _, _, _, adds, device = call
    return _prepared(tile_of(f"add_{op}" if adds else op, N, M, device), call)


def run(
    prepared: launching.Prepared | None,
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    epsilon: float,
    y: Tensor,
    scale: Tensor | None,
) -> None:
    """Launch what was prepared, if anything; the other arguments as :func:`launch`."""
    if prepared is None:
        return
    form, grid, constants = prepared
    row, residual_row = x.stride()[0], 0 if residual is None else residual.stride()[0]
    pointers, numbers = (x, residual, weight, y, scale), (x.shape[0], row, residual_row, epsilon)
    form(grid, pointers, numbers, constants, (row, residual_row))
