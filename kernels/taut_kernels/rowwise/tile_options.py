"""What the fused kernels' launchers share: a call's tile, its launch, compiler options."""

from __future__ import annotations

from typing import Any

import torch

from taut_kernels.launch import launcher as launching
from taut_kernels.rowwise import tiles as tiles_fused
from taut_kernels.rowwise.tiles import FusedTile


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not below ``number`` ≥ 1.

    Triton's function of that name and its `cdiv` take 2 µs a call: they are made for kernels.
    """
    return 1 << (number - 1).bit_length()


def tile_of(op: str, N: int, M: int, device: torch.device) -> FusedTile:
    """Return the tile of a call, early where the card can start kernels early.

    Args:
        op: a key of `tiles_fused.OPS`.
        N: as of `tiles_fused.lookup`.
        M: rows (tokens).
        device: where it runs.
    """
    return tiles_fused.lookup(launching.gpu_name(device), op, N, M, launching.is_hopper(device))


def launch_options(tile: FusedTile) -> dict[str, Any]:
    """Return what the fused kernels' launchers pass to the compiler for a tile.

    Without contraction the kernels round where their references round.

    Args:
        tile: of the call.
    """
    options: dict[str, Any] = {"num_warps": tile.num_warps, "enable_fp_fusion": False}
    if tile.registers:
        options["maxnreg"] = tile.registers
    return options | launching.PDL_OPTIONS[tile.pdl]


def prepare(
    launcher: launching.Launcher,
    types: tuple[Any, ...],
    values: tuple[Any, ...],
    tile: FusedTile,
    programs: int,
    device: torch.device,
) -> launching.Prepared:
    """Prepare a call with a given tile.

    Args:
        launcher: of the kernel.
        types: of the operands, and which of them are absent.
        values: of the kernel's constants, its last arguments.
        tile: how to cut the work.
        programs: how many.
        device: of all operands.
    """
    return launching.Prepared(
        launcher.form((types, values, tile.num_warps, tile.registers), launching.number(device)),
        (programs, 1, 1),
        lambda: (last_arguments(launcher.kernel, values), launch_options(tile)),
    )


def block_of(tile: FusedTile, N: int) -> int:
    """Return the columns a step of a row of N columns takes; no more than a short row has."""
    return min(tile.block, max(8, next_power_of_2(N)))


def prepare_rows(
    launchers: tuple[launching.Launcher, launching.Launcher],
    tile: FusedTile,
    out: str,
    sizes: tuple[int, int],
    types: tuple[Any, ...],
    device: torch.device,
) -> launching.Prepared | None:
    """Prepare a kernel over whole rows with a given tile; None where there is nothing to do.

    Args:
        launchers: of the kernel that holds a row in registers, and of that for longer rows.
        tile: how to cut the work.
        out: ``same``, ``fp8``, ``int8`` or ``static_fp8``.
        sizes: M and N.
        types: as of :func:`prepare`.
        device: likewise.
    """
    M, N = sizes
    if M == 0 or N == 0:
        return None
    launcher = launchers[N > tiles_fused.RESIDENT_LIMIT]
    values = (N, out, tile.rows, block_of(tile, N), tile.pdl)
    return prepare(launcher, types, values, tile, -(-M // tile.rows), device)


def last_arguments(kernel: Any, values: tuple[Any, ...]) -> dict[str, Any]:
    """Name a kernel's constants, its last arguments.

    Args:
        kernel: a `triton.jit` function.
        values: one each, in order.
    """
    return dict(zip(kernel.arg_names[-len(values) :], values, strict=True))
