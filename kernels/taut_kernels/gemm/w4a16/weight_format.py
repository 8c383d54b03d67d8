"""What of a W4A16 layer's weight format chooses tiles and kernels: size of groups, zero points.

Groups of 32 and 64 and zero points bring more numbers of their own to every chunk of weights, so a
tile takes more registers and shared memory; the type of activations and scales changes neither.
Rows of :mod:`.tiles_decode`, :mod:`.tiles_wgmma` and :mod:`.measured_w4a16` name a format under
``"format"``; without one they are of :data:`DEFAULT`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

FIELD = "format"
"""Of a table's row."""


class WeightFormat(StrEnum):
    """A class of formats that share their tiles; ``G128`` also is one group a channel."""

    G128 = "g128"
    G128_ZP = "g128-zp"
    G64 = "g64"
    G64_ZP = "g64-zp"
    G32 = "g32"
    G32_ZP = "g32-zp"

    @property
    def group_size(self) -> int:
        """Weights a scale covers along K; of one group a channel too, 128 stands for it."""
        return int(self.removeprefix("g").removesuffix("-zp"))

    @property
    def zero_points(self) -> bool:
        """Whether every group has one."""
        return self.endswith("-zp")

    @property
    def tried(self) -> tuple[WeightFormat, ...]:
        """This format, then those whose tiles stand in for its own, nearest first."""
        near = _NEAR[self]
        return (self, *near) if self is DEFAULT else (self, *near, DEFAULT)


DEFAULT = WeightFormat.G128
_NEAR: dict[WeightFormat, tuple[WeightFormat, ...]] = {
    WeightFormat.G128: (),
    WeightFormat.G128_ZP: (),
    WeightFormat.G64: (WeightFormat.G64_ZP,),
    WeightFormat.G64_ZP: (WeightFormat.G64,),
    WeightFormat.G32: (WeightFormat.G32_ZP,),
    WeightFormat.G32_ZP: (WeightFormat.G32,),
}


def of_layer(group_size: int, K: int, *, has_zeros: bool) -> WeightFormat:
    """Return a layer's format.

    Args:
        group_size: G; -1, 0 or K for one group a channel.
        K: input features.
        has_zeros: with zero points.
    """
    size = group_size if group_size in (32, 64) and group_size != K else 128
    return WeightFormat(f"g{size}-zp" if has_zeros else f"g{size}")


def of_row(row: Mapping[str, Any]) -> WeightFormat:
    """Return the format of a table's row.

    Args:
        row: may have :data:`FIELD`.

    Raises:
        ValueError: it has, and that is no format, or the one rows without it are of.
    """
    if FIELD not in row:
        return DEFAULT
    named = [known.value for known in WeightFormat if known is not DEFAULT]
    if row[FIELD] not in named:
        raise ValueError(f"{FIELD} must be one of {named} or left out, got {row[FIELD]!r}")
    return WeightFormat(row[FIELD])


def as_field(weight_format: WeightFormat) -> dict[str, str]:
    """Return what names a format in a table's row: nothing for :data:`DEFAULT`."""
    return {} if weight_format is DEFAULT else {FIELD: weight_format.value}


def in_words(group_size: int, *, zero_points: bool) -> str:
    """Return a format as a sentence names it: ``groups of 32 with zero points``.

    Args:
        group_size: G; -1 for one group a channel.
        zero_points: whether every group has one.
    """
    kind, behind = ("", " with zero points") if zero_points else ("symmetric ", "")
    if group_size == -1:
        return f"one {kind}group a channel{behind}"
    return f"{kind}groups of {group_size}{behind}"
