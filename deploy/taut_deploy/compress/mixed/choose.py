"""A recipe's ``mixed`` stage becomes ordinary ``quantize`` stages, one a format."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.formats.registry import weight_format
from taut_deploy.compress.mixed.knapsack import Option, within_bytes, within_loss
from taut_deploy.compress.mixed.scores import Unit
from taut_deploy.errors import RecipeError
from taut_deploy.fused_layers import fused_groups
from taut_deploy.recipe import Mixed, Quantize, Recipe, is_matched

_EXPERTS = ".experts."
Shapes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Args:
        bits: bits a weight of the stage's layers take on disk, scales and zero points included.
        bytes: of those layers.
        predicted_kl: what they cost the model, in nats, if every layer were rounded to nearest.
        candidates: position of each layer's candidate.
    """

    bits: float
    bytes: int
    predicted_kl: float
    candidates: dict[str, int]

    def as_json(self) -> dict[str, object]:
        """As plain data."""
        return asdict(self)


def units_of(stage: Mixed, recipe: Recipe, shapes: Shapes, dtype: torch.dtype) -> list[Unit]:
    """What is decided together: layers that vLLM joins, and every other layer by itself.

    Args:
        stage: of the recipe.
        recipe: its ``ignore`` holds for all stages.
        shapes: [N, K] of each linear layer of the blocks, by full name.
        dtype: of the model's weights.

    Raises:
        RecipeError: the stage has no layer, or no candidate fits one; names it.
    """
    names = [n for n in shapes if stage.selects(n) and not is_matched(n, recipe.ignore)]
    if not names:
        raise RecipeError("stages: 'layers' and 'ignore' leave 'mixed' no linear layer")
    return [Unit(group, _formats(group, stage, shapes, dtype)) for group in _together(names)]


def _together(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Layers that vLLM stores alike: joined ones, and all experts of a block."""
    owner = {name: group[0] for group in fused_groups(names) for name in group}
    groups: dict[str, list[str]] = {}
    for name in names:
        mixture, is_expert, _ = name.partition(_EXPERTS)
        groups.setdefault(mixture if is_expert else owner.get(name, name), []).append(name)
    return [tuple(group) for group in groups.values()]


def _formats(
    layers: tuple[str, ...], stage: Mixed, shapes: Shapes, dtype: torch.dtype
) -> dict[int, WeightFormat]:
    """What the candidates that fit all of the layers store them in, the smallest first."""
    found: dict[int, WeightFormat] = {}
    reasons = []
    for index, candidate in enumerate(stage.candidates):
        try:
            one = weight_format(candidate, {shapes[name][1] for name in layers}, dtype)
        except RecipeError as error:
            reasons.append(str(error))
            continue
        reason = next(filter(None, (one.why_not(*shapes[name]) for name in layers)), None)
        if reason is None:
            found[index] = one
        else:
            reasons.append(reason)
    if not found:
        raise RecipeError(
            f"stages.candidates: none fits {layers[0]} {list(shapes[layers[0]])}: {reasons[0]}; "
            "put it into 'ignore'"
        )
    return dict(sorted(found.items(), key=lambda item: _size(layers, item[1], shapes)))


def _size(layers: Sequence[str], layer_format: WeightFormat, shapes: Shapes) -> int:
    return sum(layer_format.stored_bytes(*shapes[name]) for name in layers)


def choose(
    stage: Mixed,
    units: Sequence[Unit],
    losses: Sequence[Mapping[str, float]],
    shapes: Shapes,
    other_bytes: int,
) -> Choice:
    """Choose each unit's candidate.

    Args:
        stage: with its target.
        units: of :func:`units_of`.
        losses: of each unit, in nats, by the candidate's position as text.
        shapes: [N, K] of the layers, by full name.
        other_bytes: of the checkpoint's weights outside the units.

    Raises:
        RecipeError: the target cannot be met; says by how much.
    """
    options = [
        [
            Option(index, _size(unit.layers, one, shapes), losses[number][str(index)])
            for index, one in unit.formats.items()
        ]
        for number, unit in enumerate(units)
    ]
    weights = sum(shapes[name][0] * shapes[name][1] for unit in units for name in unit.layers)
    if stage.max_kl is not None:
        chosen = within_loss(options, stage.max_kl)
    else:
        budget = int((stage.target_bits or 0) * weights / 8)
        if stage.target_bytes is not None:
            budget = stage.target_bytes - other_bytes
        chosen = within_bytes(options, budget)
    if chosen is None:
        raise RecipeError(_out_of_reach(stage, options, weights, other_bytes))
    size = sum(option.bytes for option in chosen)
    return Choice(
        round(8 * size / weights, 4),
        size,
        sum(option.loss for option in chosen),
        {
            name: option.candidate
            for unit, option in zip(units, chosen, strict=True)
            for name in unit.layers
        },
    )


def _out_of_reach(
    stage: Mixed, options: Sequence[Sequence[Option]], weights: int, other_bytes: int
) -> str:
    smallest = sum(min(one.bytes for one in unit) for unit in options)
    if stage.max_kl is not None:
        best = sum(min(one.loss for one in unit) for unit in options)
        return (
            f"max_kl: the best candidates are predicted to cost {best:.4g} nats; raise it, or "
            "add a candidate of more bits"
        )
    if stage.target_bytes is not None:
        return (
            f"target_bytes: the smallest candidates make {smallest + other_bytes} bytes; raise it, "
            "or add a candidate of fewer bits"
        )
    return (
        f"target_bits: the smallest candidates take {8 * smallest / weights:.3f} bits a weight, "
        "scales included; raise it, or add a candidate of fewer bits"
    )


def resolved(recipe: Recipe, stage: Mixed, units: Sequence[Unit], choice: Choice) -> Recipe:
    """The recipe with ``quantize`` stages in the place of ``mixed``.

    Args:
        recipe: as it was asked for.
        stage: its ``mixed`` stage.
        units: of :func:`units_of`.
        choice: of :func:`choose`.
    """
    layers: dict[tuple[int, Any], list[str]] = {}
    for unit in units:
        index = choice.candidates[unit.layers[0]]
        # By group size, too: one stage has one for all its layers.
        layers.setdefault((index, unit.formats[index].group_size), []).extend(unit.layers)
    made = [
        _quantize(stage.candidates[index], group, names)
        for (index, group), names in sorted(layers.items(), key=lambda item: str(item[0]))
    ]
    stages = [part for one in recipe.stages for part in (made if isinstance(one, Mixed) else [one])]
    return recipe.model_copy(update={"stages": tuple(stages)})


def _quantize(candidate: Quantize, group: int | None, names: Sequence[str]) -> Quantize:
    size = candidate.group_size if group is None else group
    return candidate.model_copy(update={"layers": tuple(names), "group_size": size})
