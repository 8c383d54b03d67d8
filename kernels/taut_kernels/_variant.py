"""One compiled form of a Triton kernel, described without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from taut_kernels.tiles import TileConfig
from taut_kernels.tiles_decode import DecodeTile


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """What ahead-of-time compilation needs to know about one specialisation.

    Args:
        label: op, dtype and options, for the report.
        kernel: the `triton.jit` function.
        tile: the tile it is compiled for.
        pointers: argument name → element type as Triton spells it; each is taken as 16-byte
            aligned.
        integers: names of the run-time int32 arguments.
        divisible_by_16: those of ``integers`` that the launch specialises as multiples of 16.
        constants: argument name → value fixed at compile time (None for an absent tensor).
        allowed_spill_bytes: local memory a thread may use; more than 0 only for a measured tile
            that is faster with it (kernels/README.md).
    """

    label: str
    kernel: Any
    tile: TileConfig | DecodeTile
    pointers: dict[str, str]
    integers: tuple[str, ...]
    divisible_by_16: tuple[str, ...]
    constants: dict[str, Any]
    allowed_spill_bytes: int = 0
