"""What a compression will do, before it does it: layers, formats, bytes."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from taut_deploy.compress import kv_cache
from taut_deploy.compress.formats.config import describe
from taut_deploy.compress.formats.protocol import LayerFormat
from taut_deploy.compress.resolve import Treatment, resolve
from taut_deploy.compress.source.linears import linear_layers
from taut_deploy.compress.source.stream import StreamedModel
from taut_deploy.compress.tables import TablePlan, tables_of
from taut_deploy.recipe import Recipe, is_matched


@dataclass(frozen=True)
class LayerPlan:
    """One linear layer.

    Args:
        name: full name.
        shape: [N, K].
        fate: the stages that act on it, joined by ``+``, or why none does.
        treated: whether any stage acts on it.
        scheme: what it is stored in, None where it stays dense.
        group_size: weights per scale, None where scales are of no group.
        bytes_before: of its weight in the model.
        bytes: of the layer on disk.
        kernel: what will serve it, with what is against ours; empty where nobody asked.
    """

    name: str
    shape: tuple[int, int]
    fate: str
    treated: bool
    scheme: str | None
    group_size: int | None
    bytes_before: int
    bytes: int
    kernel: str = ""


@dataclass(frozen=True)
class CompressionPlan:
    """The whole plan.

    Args:
        recipe: recipe name.
        scheme: what layers are stored in; ``mixed`` where that differs, ``dense`` where none is
            quantised.
        group_size: chosen group size; None where it is no group, or not the same everywhere.
        blocks: number of decoder blocks.
        block_names: their full names, in order.
        layers: every linear layer inside them.
        bytes_before: size of the model's weights.
        bytes_after: predicted size of the checkpoint's weights.
        disk_bytes: predicted peak use of the output's file system.
        peak_memory_bytes: most memory held at a time, by a trial; 0 before one.
        device_memory_bytes: likewise of a card; None without one.
        seconds: that the blocks will take, by a trial; None before one.
        stacked_experts: experts that stay dense because files and servers hold them as one tensor.
        whole_model: what each whole-model stage does, in words.
        tables: embeddings and head where they are not dense.
        devices: that share the calibration; empty for one.
    """

    recipe: str
    scheme: str
    group_size: int | None
    blocks: int
    block_names: tuple[str, ...]
    layers: tuple[LayerPlan, ...]
    bytes_before: int
    bytes_after: int
    disk_bytes: int
    peak_memory_bytes: int = 0
    device_memory_bytes: int | None = None
    seconds: float | None = None
    stacked_experts: tuple[str, ...] = ()
    whole_model: tuple[str, ...] = ()
    tables: tuple[TablePlan, ...] = ()
    devices: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """The plan as plain data."""
        return asdict(self)


def shapes_of(model: StreamedModel) -> dict[str, tuple[int, int]]:
    """[N, K] of every linear layer of the decoder blocks, by full name."""
    return {
        f"{block.name}.{name}": (layer.out_features, layer.in_features)
        for block in model.blocks
        for name, layer in linear_layers(block.module)
    }


def treatments_of(model: StreamedModel, recipe: Recipe, dtype: torch.dtype) -> dict[str, Treatment]:
    """What happens to every linear layer of the decoder blocks, by full name.

    Raises:
        RecipeError: the recipe does not fit the model.
    """
    shapes = shapes_of(model)
    outer = frozenset(name for name, _ in linear_layers(model.model)) - shapes.keys()
    treatments = resolve(shapes, recipe, dtype, outer)
    if recipe.kv_cache is not None:
        kv_cache.require_suited(model.model, formats_of(treatments).values(), recipe.kv_cache)
    return treatments


def formats_of(treatments: Mapping[str, Treatment]) -> dict[str, LayerFormat]:
    """The format of every layer that has one, by full name."""
    return {name: one.format for name, one in treatments.items() if one.format is not None}


def make_plan(
    model: StreamedModel,
    recipe: Recipe,
    treatments: Mapping[str, Treatment],
    directory: Path,
    dtype: torch.dtype,
) -> CompressionPlan:
    """Work out what compressing ``model`` by ``recipe`` will do.

    Args:
        model: its blocks still on disk.
        recipe: what to do.
        treatments: of :func:`treatments_of`.
        directory: of the model.
        dtype: of the model's weights.

    Raises:
        RecipeError: embeddings or head cannot be stored as the recipe says.
    """
    formats = formats_of(treatments)
    tables = tables_of(model.model, recipe, dtype, formats.values())
    element = dtype.itemsize
    layers = tuple(layer_plan(one, recipe, element) for one in treatments.values())
    sizes = {layer.name: math.prod(layer.shape) for layer in layers}
    before = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    after = before + sum(layer.bytes - sizes[layer.name] * element for layer in layers)
    after += sum(table.bytes - table.bytes_before for table in tables)
    # Computed in fp32 where a CPU lacks 16-bit products.
    hidden = _hidden_bytes(model, recipe, model.dtype.itemsize)
    groups = {one.group_size for one in formats.values()}
    return CompressionPlan(
        recipe=recipe.name,
        scheme=describe(formats, sizes, 8 * element)[0],
        group_size=groups.pop() if len(groups) == 1 else None,
        blocks=len(model.blocks),
        block_names=tuple(block.name for block in model.blocks),
        layers=layers,
        stacked_experts=tuple(model.stacked_experts),
        tables=tuple(table.planned() for table in tables),
        bytes_before=before,
        bytes_after=after,
        disk_bytes=after + 3 * hidden,
    )


def layer_plan(one: Treatment, recipe: Recipe, element: int) -> LayerPlan:
    """What happens to one layer.

    Args:
        one: its treatment.
        recipe: of the block stages.
        element: bytes of a number in the model.
    """
    layer_format = one.format
    before = math.prod(one.shape) * element
    return LayerPlan(
        one.name,
        one.shape,
        _fate(one, recipe),
        bool(one.stages),
        None if layer_format is None else layer_format.name,
        None if layer_format is None else layer_format.group_size,
        before,
        before if layer_format is None else layer_format.stored_bytes(*one.shape),
    )


def _fate(one: Treatment, recipe: Recipe) -> str:
    if one.stages:
        return "+".join(recipe.stages[index].method for index in sorted(one.stages))
    ignored = is_matched(one.name, recipe.ignore)
    return "ignored by the recipe" if ignored else "not picked by any stage"


def _hidden_bytes(model: StreamedModel, recipe: Recipe, element: int) -> int:
    width = int(model.model.config.get_text_config().hidden_size)
    streams = 2 if recipe.needs_target else 1
    tokens = recipe.calibration.sequences * recipe.calibration.sequence_length
    return streams * tokens * width * element
