"""Whether weights that were rounded are still those of the baseline.

What a slip in a writer does to weights may cost so little on a text that no limit notices: a layer
whose scales are all 10 % too large, or the columns at the edges of groups multiplied by the scale
of the group beside them. Against the baseline's own weights both stand out.

Columns may legitimately have been multiplied (smoothing, AWQ) or rotated. So a column is compared
after the factor that fits it best, and a layer's factor is judged only where every column
and every row has the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from taut_deploy.validate.outcome import RuleOutcome, Verdict

EDGE_METRIC, GAIN_METRIC = "group_edge_error", "weight_gain"
EDGE_LIMIT = 0.5
"""Share of what a slip by one column would make of the columns at the edges of groups."""
GAIN_LIMIT = 0.05
"""How far a layer's factor may be from one, beyond what rounding to its grid takes."""
_ROWS = 1024  # a sample is enough, and the rest of a large matrix is not read
_SURE = 6.0  # standard errors
_UNIFORM = 0.02  # standard deviation of the factors of columns and rows, beside what rounding makes
_LEAST_GROUP = 8
_KEPT = 0.6  # pruned weights have another factor rightly
_OWN = 0.9  # cosine below which a matrix was rotated, or is another one


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A weight that was rounded, as multiplied.

    Args:
        weight: [rows, columns].
        scale: [rows, groups] of neighbouring columns; None where there are no such groups.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None


def rounded_weights(model: nn.Module) -> dict[str, RoundedWeight]:
    """The weights of a model that compressed-tensors unpacked.

    Args:
        model: after its first forward pass.
    """
    found = {}
    for name, weight in plain_weights(model).items():
        module = model.get_submodule(name)
        arguments = getattr(getattr(module, "quantization_scheme", None), "weights", None)
        if arguments is None:
            continue
        found[name] = RoundedWeight(weight, _scales_of_groups(module, arguments, weight.shape))
    return found


def _scales_of_groups(module: nn.Module, arguments: Any, shape: torch.Size) -> torch.Tensor | None:
    """Scales of a layer whose groups are neighbouring columns; None of any other."""
    size = getattr(arguments, "group_size", None) or 0
    scale = getattr(module, "weight_scale", None)
    if size < _LEAST_GROUP or not isinstance(scale, torch.Tensor):
        return None
    if getattr(arguments, "actorder", None) is not None:
        return None  # columns sorted by their activations do not lie beside those of their group
    several = scale.dim() == 2 and scale.shape[1] > 1
    return scale if several and scale.shape == (shape[0], shape[1] // size) else None


def plain_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The matrices of a model by the name of their module.

    Args:
        model: any.
    """
    found = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.is_floating_point():
            found[name] = weight
    return found


def judge_weights(
    baseline: Mapping[str, torch.Tensor], candidate: Mapping[str, RoundedWeight]
) -> tuple[RuleOutcome, ...]:
    """Compare every rounded weight with the baseline's of the same name and shape.

    Args:
        baseline: weights by the name of their module.
        candidate: likewise.

    Returns:
        Two rules, with the worst layer of each; none where nothing could be compared.
    """
    edges, gains = [], []
    for name, before, after, scale in _pairs(baseline, candidate):
        if scale is not None:
            edges.append((_wrong_at_edges(before, after, scale), name))
        if (gain := _uniform_gain(before, after)) is not None:
            gains.append((max(0.0, abs(gain - 1.0) - _shrunk_by_rounding(before, after)), name))
    found = []
    for metric, limit, values, what in (
        (EDGE_METRIC, EDGE_LIMIT, edges, "of the slip that the scale of the group beside would be"),
        (
            GAIN_METRIC,
            GAIN_LIMIT,
            gains,
            "of its size, all columns alike, beyond what rounding takes",
        ),
    ):
        if values:
            worst, name = max(values)
            verdict = Verdict.PASS if worst <= limit else Verdict.FAIL
            reason = f"of {len(values)} layers, {name} is worst: {worst:.3g} {what}"
            found.append(RuleOutcome(metric, "max", limit, verdict, limit - worst, reason))
    return tuple(found)


def _pairs(
    baseline: Mapping[str, torch.Tensor], candidate: Mapping[str, RoundedWeight]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Name, and rows of both weights and of the scales in fp64, spread over the matrix."""
    for name, rounded in candidate.items():
        before = baseline.get(name)
        if before is None or before.shape != rounded.weight.shape:
            continue
        step = max(1, len(before) // _ROWS)
        given = (before, rounded.weight, rounded.scale)
        first, second, scale = (
            None if one is None else one[::step].detach().double().cpu() for one in given
        )
        if first is not None and second is not None and first.norm() > 0 and second.norm() > 0:
            yield name, first, second, scale


def _wrong_at_edges(before: torch.Tensor, after: torch.Tensor, scale: torch.Tensor) -> float:
    """How far columns at the edges of groups follow the scale of the group beside them, 0 to 1.

    Read with the scale of its own group, a weight written with its neighbour's is off by the ratio
    of both, another one in each row. The share is the slope of a column's error over what that
    slip would make of it; 0 where it is within noise.
    """
    groups = scale.shape[1]
    size = before.shape[1] // groups
    worst = 0.0
    for edge, beside in ((size - 1, 1), (0, -1)):
        own = [g for g in range(groups) if 0 <= g + beside < groups]
        columns = [g * size + edge for g in own]
        ratio = scale[:, own] / scale[:, [g + beside for g in own]]
        error = after[:, columns]
        weight = before[:, columns] * (error != 0)  # what was pruned has no scale
        expected = _apart_from(weight, weight * (ratio - 1.0))
        error = _apart_from(weight, error)
        power = float(expected.square().sum())
        if power <= 0.0:
            continue
        slope = float((error * expected).sum()) / power
        noise = float((error - slope * expected).square().sum()) / error.numel()
        if abs(slope) > _SURE * float(np.sqrt(noise / power)):
            worst = max(worst, abs(slope))
    return worst


def _apart_from(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What remains of columns once each loses its multiple of the same column of ``weight``."""
    power = weight.square().sum(0).clamp_min(1e-300)
    return values - weight * ((weight * values).sum(0) / power)


def _uniform_gain(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """The one factor of a whole layer; None where columns or rows have factors of their own."""
    product = before * after
    cosine = float(product.sum() / (before.norm() * after.norm()))
    if cosine < _OWN or float((after != 0).double().mean()) < _KEPT:
        return None
    square = before.square()
    gain = float(product.sum() / square.sum())
    for axis in (0, 1):
        factors = product.sum(axis) / square.sum(axis).clamp_min(1e-300)
        # Rounding alone spreads the factor of a column of n weights by its error over sqrt(n).
        rounding = np.sqrt(max(1.0 / cosine**2 - 1.0, 0.0) / before.shape[axis])
        if float(factors.std()) > gain * (_UNIFORM + 2.0 * rounding):
            return None
    return gain


def _shrunk_by_rounding(before: torch.Tensor, after: torch.Tensor) -> float:
    """How much smaller a grid may make a whole layer: the share of its square that rounding costs.

    A quantiser whose levels are the means of what they stand for leaves ``<w, q> = |q|²``, so the
    factor of ``q`` is one less its relative error: 1 % at four bits and 12 % at two (Lloyd, IEEE
    Trans. Inf. Theory 28, 1982). Taken of what is left after the layer's factor, which is so no
    part of it.
    """
    square = before.square().sum()
    left = after - before * (float((before * after).sum()) / square)
    return float(left.square().sum() / square)
