"""What a compression will do, before it does it: layers, group size, bytes."""

import fnmatch
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from taut_deploy.compress.quantize.grid import GridSpec
from taut_deploy.compress.source.stream import StreamedModel, linear_layers
from taut_deploy.errors import RecipeError
from taut_deploy.recipe import Quantize, Recipe

_GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True)
class LayerPlan:
    """One linear layer: its name, its shape [N, K], and its fate (``quantize`` or why not)."""

    name: str
    shape: tuple[int, int]
    fate: str


@dataclass(frozen=True)
class CompressionPlan:
    """The whole plan.

    Args:
        recipe: recipe name.
        scheme: quantisation scheme.
        group_size: chosen group size, None per channel.
        blocks: number of decoder blocks.
        layers: every linear layer inside them.
        bytes_before: size of the model's weights.
        bytes_after: predicted size of the checkpoint's weights.
        peak_memory_bytes: predicted peak of weights, statistics and activations held at once.
        disk_bytes: predicted peak use of the output's file system.
    """

    recipe: str
    scheme: str
    group_size: int | None
    blocks: int
    layers: tuple[LayerPlan, ...]
    bytes_before: int
    bytes_after: int
    peak_memory_bytes: int
    disk_bytes: int

    def as_json(self) -> dict[str, object]:
        """The plan as plain data."""
        return asdict(self)


def is_ignored(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a layer's full name matches one of the ``ignore`` patterns (shell wildcards)."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _require_matches(model: StreamedModel, patterns: tuple[str, ...]) -> None:
    """Refuse a pattern that matches no layer: what it was meant to protect would be rounded.

    Raises:
        RecipeError: naming the pattern.
    """
    # The head may be tied or called otherwise; the default pattern is for those that have it.
    names = ["lm_head", *(name for name, _ in linear_layers(model.model))]
    for pattern in patterns:
        if not any(is_ignored(name, (pattern,)) for name in names):
            example = next((name for name in names[1:] if name != "lm_head"), names[0])
            raise RecipeError(
                f"ignore: {pattern!r} matches no linear layer; use shell wildcards over full names "
                f"such as {example}"
            )


def grid_spec(quantize: Quantize, input_sizes: set[int], scale_dtype: torch.dtype) -> GridSpec:
    """The grid a stage asks for, its group size chosen to divide every layer.

    Raises:
        RecipeError: if no allowed group size divides every K.
    """
    if quantize.group_size is None:
        return GridSpec(quantize.num_bits, None, quantize.symmetric, scale_dtype)
    for group in _GROUP_SIZES:
        if group <= quantize.group_size and all(k % group == 0 for k in input_sizes):
            return GridSpec(quantize.num_bits, group, quantize.symmetric, scale_dtype)
    sizes = ", ".join(str(k) for k in sorted(input_sizes))
    raise RecipeError(
        f"stages.quantize.group_size: none of 128, 64, 32 up to {quantize.group_size} divides "
        f"every layer input ({sizes}); put the odd layers into 'ignore'"
    )


def make_plan(
    model: StreamedModel, recipe: Recipe, directory: Path, scale_dtype: torch.dtype
) -> CompressionPlan:
    """Work out what compressing ``model`` by ``recipe`` will do.

    Raises:
        RecipeError: if a pattern in ``ignore`` leaves nothing to do, or no group size fits.
    """
    layers = tuple(
        LayerPlan(
            f"{block.name}.{name}",
            (layer.out_features, layer.in_features),
            _fate(f"{block.name}.{name}", recipe),
        )
        for block in model.blocks
        for name, layer in linear_layers(block.module)
    )
    _require_matches(model, recipe.ignore)
    chosen = [layer for layer in layers if layer.fate == "quantize"]
    if not chosen:
        raise RecipeError("ignore: matches every linear layer, so there is nothing to compress")
    spec = grid_spec(recipe.quantize, {layer.shape[1] for layer in chosen}, scale_dtype)
    before = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    element = scale_dtype.itemsize
    dense = sum(math.prod(layer.shape) * element for layer in chosen)
    after = before - dense + sum(_stored_bytes(layer.shape, spec, element) for layer in chosen)
    # Computed in fp32 where a CPU lacks 16-bit products.
    wider = model.dtype.itemsize / element
    hidden = _hidden_bytes(model, recipe, model.dtype.itemsize)
    outer = int((before - dense) * wider)
    widest = max(layer.shape[1] for layer in layers)
    block_bytes = sum(4 * math.prod(layer.shape) for layer in layers) // len(model.blocks)
    return CompressionPlan(
        recipe=recipe.name,
        scheme=recipe.quantize.scheme,
        group_size=spec.group_size,
        blocks=len(model.blocks),
        layers=layers,
        bytes_before=before,
        bytes_after=after,
        peak_memory_bytes=2 * hidden + 3 * block_bytes + 6 * 4 * widest * widest + outer,
        disk_bytes=after + 3 * hidden,
    )


def _fate(name: str, recipe: Recipe) -> str:
    return "ignored by the recipe" if is_ignored(name, recipe.ignore) else "quantize"


def _stored_bytes(shape: tuple[int, int], spec: GridSpec, scale_bytes: int) -> int:
    n, k = shape
    groups = n * (k // (spec.group_size or k))
    zeros = 0 if spec.symmetric else groups * spec.num_bits // 8
    return n * k * spec.num_bits // 8 + groups * scale_bytes + zeros


def _hidden_bytes(model: StreamedModel, recipe: Recipe, element: int) -> int:
    width = int(model.model.config.hidden_size)
    return recipe.calibration.sequences * recipe.calibration.sequence_length * width * element
