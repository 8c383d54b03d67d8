"""One compiled form of a Triton kernel, described without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from taut_kernels.launch import assembler as launch_assembler


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """What ahead-of-time compilation needs to know about one specialisation.

    Args:
        label: op, dtype and options, for the report.
        kernel: the `triton.jit` function.
        tile: what it is compiled for; hashable, and ``str`` names it in the report.
        pointers: argument name → element type as Triton spells it; each is taken as 16-byte
            aligned.
        integers: names of the run-time int32 arguments.
        divisible_by_16: those of ``integers`` that the launch specialises as multiples of 16.
        constants: argument name → value fixed at compile time (None for an absent tensor).
        floats: names of the run-time fp32 arguments.
        options: what the launcher passes to the compiler.
        targets: architectures the launcher runs this form on.
        allowed_spill_bytes: local memory a thread may use; more than 0 only for a measured tile
            that is faster with it (kernels/README.md).
        descriptors: argument name → element type and block of a host-side tensor descriptor, as
            Triton spells them.
        assembler: what the launcher compiles in (:mod:`.assembler`).
    """

    label: str
    kernel: Any
    tile: object
    pointers: dict[str, str]
    integers: tuple[str, ...]
    divisible_by_16: tuple[str, ...]
    constants: dict[str, Any]
    options: dict[str, Any]
    floats: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("sm_80", "sm_90")
    allowed_spill_bytes: int = 0
    descriptors: dict[str, str] = field(default_factory=dict)
    assembler: launch_assembler.Choice = nullcontext


def each_once(
    variants: Callable[[], Iterator[KernelVariant]],
) -> Callable[[], Iterator[KernelVariant]]:
    """Let a generator of variants leave out those it had: a table may name a rule's own tile.

    Args:
        variants: yields some whose labels tell them apart, with the tile and the targets.
    """

    @wraps(variants)
    def without_copies() -> Iterator[KernelVariant]:
        seen: set[tuple[object, ...]] = set()
        for variant in variants():
            key = (variant.label, variant.tile, variant.targets)
            if key not in seen:
                seen.add(key)
                yield variant

    return without_copies
