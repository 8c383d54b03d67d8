"""Launcher of :mod:`.op`: calls, their plans, and the launch of one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from taut_kernels.launch import launcher
from taut_kernels.rope.rope_kernel import rope_kernel
from taut_kernels.rowwise.tile_options import next_power_of_2, prepare, tile_of
from taut_kernels.rowwise.tiles import FusedTile

Pair = tuple[Tensor, Tensor]
_rope = launcher.Launcher(rope_kernel)


def launch(
    tile: FusedTile,
    positions: Tensor,
    q: Tensor,
    k: Tensor | None,
    cos_sin_cache: Tensor,
    neox: bool,
    apart: Pair | None = None,
) -> None:
    """Run the kernel with a given tile; what the ops do after the look-up, and what tuning calls.

    Args:
        tile: tokens (``rows``) and heads (``block``) a program.
        positions: [T] int64.
        q: [T, Hq, D].
        k: [T, Hk, D] or None.
        cos_sin_cache: [P, R]; with ``apart`` R is not 0.
        neox: as in :func:`.op.rope_ref`.
        apart: where the results go, contiguous, the second not looked at for k None; None: in
            place.
    """
    call = call_of(positions, q, k, cos_sin_cache, neox, apart is not None)
    run(_prepared(tile, *call), positions, q, k, cos_sin_cache, apart)


Call = tuple[tuple[int, ...], int, int, tuple[torch.dtype, ...], torch.device, bool, bool]
"""All of a call but its tensors and their strides: T, Hq and D of q, the heads of k, R, the types
of q, of the table and of the positions, the device, ``neox``, and whether the results are new
tensors."""


def call_of(
    positions: Tensor, q: Tensor, k: Tensor | None, cos_sin_cache: Tensor, neox: bool, apart: bool
) -> Call:
    """Return all of a call that its plan follows from; ``apart``: into new tensors."""
    kv_heads = 0 if k is None else k.shape[1]
    types = q.dtype, cos_sin_cache.dtype, positions.dtype
    return q.shape, kv_heads, cos_sin_cache.shape[1], types, q.device, neox, apart


def _prepared(
    tile: FusedTile,
    shape: tuple[int, ...],
    num_kv_heads: int,
    rotated: int,
    types: tuple[torch.dtype, ...],
    device: torch.device,
    neox: bool,
    apart: bool,
) -> launcher.Prepared | None:
    """Prepare a call with a given tile; None where there is nothing to do."""
    (T, num_heads, dim), half = shape, rotated // 2
    if T == 0 or half == 0 or num_heads + num_kv_heads == 0:
        return None
    blocks = -(-num_heads // tile.block) + -(-num_kv_heads // tile.block)
    columns = (0, half, next_power_of_2(half), 0)
    if apart:
        rest = next_power_of_2(dim - rotated) if dim > rotated else 0
        columns = (dim, half, next_power_of_2(half), rest)
    values = (num_heads, num_kv_heads, *columns, neox, tile.rows, tile.block, tile.pdl)
    return prepare(_rope, types, values, tile, -(-T // tile.rows) * blocks, device)


# Asked in every call: kept by everything the answer follows from.
@lru_cache(maxsize=8192)
def plan(early_tokens: int, *call: Any) -> launcher.Prepared | None:
    """Prepare a call of an op, by the tile the tables or their rule choose."""
    (T, heads, _), kv_heads, _, _, device, _, _ = call
    return _prepared(tile_of("rope", heads + kv_heads, T, device), *call)


def run(
    prepared: launcher.Prepared | None,
    positions: Tensor,
    q: Tensor,
    k: Tensor | None,
    cos_sin_cache: Tensor,
    apart: Pair | None,
) -> None:
    """Launch what was prepared, if anything; the other arguments as :func:`launch`."""
    if prepared is None:
        return
    form, grid, constants = prepared
    strides = (*q.stride()[:2], *((0, 0) if k is None else k.stride()[:2]))
    if apart is None:
        new_q = new_k = None
        new_rows = (0, 0)
    else:
        new_q, new_k = apart[0], None if k is None else apart[1]
        new_rows = (new_q.stride()[0], 0 if new_k is None else new_k.stride()[0])
    pointers = (q, k, cos_sin_cache, positions, new_q, new_k)
    form(grid, pointers, (q.shape[0], *strides, *new_rows), constants, strides)
