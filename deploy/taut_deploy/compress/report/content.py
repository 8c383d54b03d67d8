"""The facts of a report, read off the manifest and the plan."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taut_deploy.checkpoint import Manifest
from taut_deploy.compress.plan import CompressionPlan, LayerPlan

_WORST = 10
# Relative errors from which the scale of colours starts and at which it ends.
_SLIGHT, _SEVERE = 1e-5, 1e-1


@dataclass(frozen=True)
class ReportedLayer:
    """One compressed layer.

    Args:
        name: full name.
        scheme: what it is stored in, group size included.
        method: what was done to it.
        relative_error: squared output error over squared output, on calibration rows.
        samples: calibration tokens seen.
        bytes_before: of its weight in the model.
        bytes_after: of everything stored of it.
    """

    name: str
    scheme: str
    method: str
    relative_error: float
    samples: int
    bytes_before: int
    bytes_after: int

    @property
    def severity(self) -> float:
        """The error between 0 and 1 on a logarithmic scale, for a colour."""
        bounded = min(max(self.relative_error, _SLIGHT), _SEVERE)
        return math.log(bounded / _SLIGHT) / math.log(_SEVERE / _SLIGHT)


@dataclass(frozen=True)
class ReportedBlock:
    """One decoder block: its layers, and the seconds it took where this run made it."""

    name: str
    layers: tuple[ReportedLayer, ...]
    seconds: float | None

    @property
    def mean_error(self) -> float:
        """Mean of the layers' relative errors."""
        return sum(layer.relative_error for layer in self.layers) / len(self.layers)

    @property
    def bytes_before(self) -> int:
        """Of its layers' weights in the model."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Of its layers as stored."""
        return sum(layer.bytes_after for layer in self.layers)


@dataclass(frozen=True)
class Report:
    """Everything the templates show.

    Args:
        manifest: of the checkpoint.
        blocks: those with a compressed layer, in order.
        worst: layers of the largest errors, falling.
        kept: layers of the blocks that stay dense.
        bytes_before: of the model's weights.
        bytes_after: of the checkpoint's weights.
        log: wall-clock facts, as ``compression_log.json`` has them.
    """

    manifest: Manifest
    blocks: tuple[ReportedBlock, ...]
    worst: tuple[ReportedLayer, ...]
    kept: tuple[LayerPlan, ...]
    bytes_before: int
    bytes_after: int
    log: Mapping[str, Any]

    @property
    def layers(self) -> list[ReportedLayer]:
        """All compressed layers, in the model's order."""
        return [layer for block in self.blocks for layer in block.layers]


def make_report(
    manifest: Manifest, plan: CompressionPlan, bytes_after: int, log: Mapping[str, Any]
) -> Report:
    """Put a report's facts together.

    Args:
        manifest: its layers' reports filled in.
        plan: of the same run; it knows sizes and what stays dense.
        bytes_after: size of the shards as written.
        log: wall-clock facts; ``seconds_by_block`` among them.
    """
    planned = {layer.name: layer for layer in plan.layers}
    layers = [_reported(layer, planned[layer["name"]]) for layer in manifest.layers]
    done = {layer.name for layer in layers}
    return Report(
        manifest,
        tuple(_blocks(layers, plan.block_names, log["seconds_by_block"])),
        tuple(sorted(layers, key=lambda layer: -layer.relative_error)[:_WORST]),
        tuple(layer for layer in plan.layers if layer.name not in done),
        plan.bytes_before,
        bytes_after,
        log,
    )


def _shown_all(layer: Mapping[str, Any]) -> str:
    """What is said of an expert that was shown tokens beyond those routed to it."""
    routed = layer.get("routed")
    return "" if routed is None else f" on all tokens ({routed} routed)"


def _reported(layer: Mapping[str, Any], planned: LayerPlan) -> ReportedLayer:
    group = f" g{layer['group_size']}" if layer["group_size"] else ""
    zeros = "" if layer["symmetric"] else ", zero points"
    kept = f", {layer['density']:.0%} of weights kept" if layer["density"] < 1 else ""
    rank = f", rank {layer['rank']}" if layer["rank"] else ""
    return ReportedLayer(
        layer["name"],
        f"{layer['scheme']}{group}{zeros}{kept}{rank}",
        layer["method"] + _shown_all(layer),
        layer["relative_error"],
        layer["samples"],
        planned.bytes_before,
        planned.bytes,
    )


def _blocks(
    layers: Sequence[ReportedLayer], names: Sequence[str], seconds: Mapping[str, float]
) -> list[ReportedBlock]:
    found = []
    for name in names:
        inside = tuple(layer for layer in layers if layer.name.startswith(f"{name}."))
        if inside:
            found.append(ReportedBlock(name, inside, seconds.get(name)))
    return found
