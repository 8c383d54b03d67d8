"""What the fused kernels' launchers share: compiler options of a tile, constants by name."""

from __future__ import annotations

from typing import Any

from taut_kernels.tiles_fused import FusedTile


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not below ``number`` ≥ 1.

    Triton's function of that name and its `cdiv` take 2 µs a call: they are made for kernels.
    """
    return 1 << (number - 1).bit_length()


def launch_options(tile: FusedTile) -> dict[str, Any]:
    """Return what the fused kernels' launchers pass to the compiler for a tile.

    Without contraction the kernels round where their references round.

    Args:
        tile: of the call.
    """
    options: dict[str, Any] = {"num_warps": tile.num_warps, "enable_fp_fusion": False}
    if tile.registers:
        options["maxnreg"] = tile.registers
    if tile.pdl:
        options["launch_pdl"] = True
    return options


def last_arguments(kernel: Any, values: tuple[Any, ...]) -> dict[str, Any]:
    """Name a kernel's constants, its last arguments.

    Args:
        kernel: a `triton.jit` function.
        values: one each, in order.
    """
    return dict(zip(kernel.arg_names[-len(values) :], values, strict=True))
