"""What ``quantization_config`` says of each layer in a checkpoint of ``quant_method: "taut"``.

``layers`` maps the full name of every compressed linear layer to its description; a layer that is
not named there is dense. Parsed once, here, for every reader. Imports no tensor library.

=============  =====================================================================================
kind           tensors of the layer
=============  =====================================================================================
``low_rank``   ``weight_u`` [N, r] and ``weight_v`` [r, K]; where ``interpolative`` ``weight_u`` is
               [N - r, r], with ``weight_order`` [N] int32 (:mod:`.low_rank`); with ``base`` also
               ``weight_packed``, ``weight_scale``, ``weight_shape`` and ``weight_zero_point`` as
               compressed-tensors' ``pack-quantized`` stores 4-bit weights, to which
               ``weight_u @ weight_v`` is added
``codebook``   ``weight_packed`` [N, K·bits/8] uint8 (:mod:`.codebook`), ``weight_scale`` [N, G],
               ``weight_codebook`` [B, entries] and ``weight_shape`` [2] int64
=============  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHOD = "taut"
FORMAT_VERSION = 1
ENTRIES = (4, 8, 16)
FACTORS = ("weight_u", "weight_v")
"""Tensors of a low-rank layer."""
ORDER = "weight_order"
"""Of a low-rank layer in the interpolative form."""
_BASE_BITS = 4


class LayerDescriptionError(ValueError):
    """``quantization_config`` says something this version does not read; names layer and key."""


@dataclass(frozen=True, slots=True)
class PackedBase:
    """4-bit weights under a low-rank correction.

    Attributes:
        group_size: weights a scale covers along K, None for all.
        symmetric: whether there are no zero points.
    """

    group_size: int | None
    symmetric: bool

    def as_json(self) -> dict[str, Any]:
        """The entry of ``base``."""
        return {
            "num_bits": _BASE_BITS,
            "group_size": self.group_size,
            "symmetric": self.symmetric,
        }


@dataclass(frozen=True, slots=True)
class LowRank:
    """Two thin factors, alone or beside a rounded weight.

    Attributes:
        rank: inner width r.
        base: what the product of the factors is added to, None where they stand alone.
        interpolative: whether the first factor holds an identity that is not stored.
    """

    rank: int
    base: PackedBase | None = None
    interpolative: bool = False

    @property
    def scheme(self) -> str:
        """Its name in reports."""
        return "LOWRANK" if self.base is None else f"W{_BASE_BITS}A16-LOWRANK"

    def as_json(self) -> dict[str, Any]:
        """The entry of a layer in ``layers``."""
        base = {} if self.base is None else {"base": self.base.as_json()}
        form = {"interpolative": True} if self.interpolative else {}
        return {"kind": "low_rank", "rank": self.rank, **form, **base}


@dataclass(frozen=True, slots=True)
class Codebook:
    """Every weight is an entry of a book, times the scale of its group.

    Attributes:
        entries: of a book: 4, 8 or 16.
        group_size: weights a scale covers along K, None for all.
        rows: output rows that share a book, None for all.
    """

    entries: int
    group_size: int | None
    rows: int | None

    @property
    def bits(self) -> int:
        """Of an index."""
        return self.entries.bit_length() - 1

    @property
    def scheme(self) -> str:
        """Its name in reports."""
        return f"CODEBOOK{self.entries}"

    def as_json(self) -> dict[str, Any]:
        """The entry of a layer in ``layers``."""
        return {
            "kind": "codebook",
            "entries": self.entries,
            "group_size": self.group_size,
            "rows": self.rows,
        }


Layer = LowRank | Codebook

SERVED: dict[str, tuple[str, str]] = {
    "LOWRANK": (
        "TautLowRankLinearMethod",
        "no taut kernel for low-rank factors yet: two products of torch, the weight never made",
    ),
    "W4A16-LOWRANK": (
        "TautLowRankLinearMethod",
        "the codes on their own W4A16 kernel, the factors by two products of torch",
    ),
    **{
        f"CODEBOOK{entries}": (
            "TautCodebookLinearMethod",
            "no taut kernel for codebooks yet: dequantised at load, no memory saved",
        )
        for entries in ENTRIES
    },
}
"""Scheme → what a worker runs it on, and why that is no kernel of ours."""


def write(layers: Mapping[str, Layer]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a checkpoint.

    Args:
        layers: description of each compressed layer, by its full name.
    """
    described = {name: layer.as_json() for name, layer in layers.items()}
    return {"quant_method": METHOD, "format_version": FORMAT_VERSION, "layers": described}


def read(entry: Mapping[str, Any]) -> dict[str, Layer]:
    """Return the description of each compressed layer, by its full name.

    Args:
        entry: ``quantization_config``, its ``quant_method`` looked at already.

    Raises:
        LayerDescriptionError: another version, no layers, or a key or value that is not known.
    """
    version = entry.get("format_version")
    if version != FORMAT_VERSION:
        raise LayerDescriptionError(
            f"format_version is {str(version)[:20]!r}, this taut reads {FORMAT_VERSION}"
        )
    layers = entry.get("layers")
    if not isinstance(layers, Mapping) or not layers:
        raise LayerDescriptionError("layers: expected an object with one entry a layer")
    return {str(name): _layer(f"layers.{name}", described) for name, described in layers.items()}


def _layer(place: str, described: Any) -> Layer:
    if not isinstance(described, Mapping):
        raise LayerDescriptionError(f"{place}: expected an object")
    kind = described.get("kind")
    if kind == "low_rank":
        _require_keys(place, described, {"kind", "rank"}, {"base", "interpolative"})
        base = described.get("base")
        read_base = None if base is None else _base(f"{place}.base", base)
        interpolative = described.get("interpolative", False)
        if not isinstance(interpolative, bool):
            raise LayerDescriptionError(f"{place}.interpolative: expected true or false")
        return LowRank(_count(place, described, "rank"), read_base, interpolative)
    if kind == "codebook":
        _require_keys(place, described, {"kind", "entries", "group_size", "rows"})
        if described["entries"] not in ENTRIES:
            known = ", ".join(map(str, ENTRIES))
            raise LayerDescriptionError(f"{place}.entries: expected one of {known}")
        return Codebook(
            described["entries"],
            _count_or_none(place, described, "group_size"),
            _count_or_none(place, described, "rows"),
        )
    raise LayerDescriptionError(f"{place}.kind: {str(kind)[:20]!r} is not low_rank or codebook")


def _base(place: str, described: Any) -> PackedBase:
    if not isinstance(described, Mapping):
        raise LayerDescriptionError(f"{place}: expected an object")
    _require_keys(place, described, {"num_bits", "group_size", "symmetric"})
    if described["num_bits"] != _BASE_BITS:
        raise LayerDescriptionError(f"{place}.num_bits: expected {_BASE_BITS}")
    if not isinstance(described["symmetric"], bool):
        raise LayerDescriptionError(f"{place}.symmetric: expected true or false")
    return PackedBase(_count_or_none(place, described, "group_size"), described["symmetric"])


def _require_keys(
    place: str, described: Mapping[str, Any], needed: set[str], optional: set[str] | None = None
) -> None:
    missing = sorted(needed - described.keys())
    if missing:
        raise LayerDescriptionError(f"{place}.{missing[0]}: is missing")
    unknown = sorted(map(str, described.keys() - needed - (optional or set())))
    if unknown:
        raise LayerDescriptionError(f"{place}.{unknown[0][:40]}: is not known to this taut")


def _count(place: str, described: Mapping[str, Any], key: str) -> int:
    value = described[key]
    if type(value) is not int or value < 1:
        raise LayerDescriptionError(f"{place}.{key}: expected a whole number above 0")
    return value


def _count_or_none(place: str, described: Mapping[str, Any], key: str) -> int | None:
    return None if described[key] is None else _count(place, described, key)
