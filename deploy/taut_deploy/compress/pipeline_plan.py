"""What ``taut compress`` of a recipe with whole-model stages will do, before it does it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from taut_deploy.compress import driver
from taut_deploy.compress.equalize.rotate_model import rehearse_rotation
from taut_deploy.compress.formats.low_rank import LowRankFormat
from taut_deploy.compress.formats.protocol import WeightFormat
from taut_deploy.compress.job import (
    CompressionJob,
    compute_dtype,
    open_stream,
    require_calibration_within_context,
    stored_dtype,
)
from taut_deploy.compress.plan import CompressionPlan, LayerPlan, layer_plan
from taut_deploy.compress.resolve import resolve
from taut_deploy.compress.shrink.axes import AXES, keep_blocks, named_as_keys, target_of
from taut_deploy.compress.shrink.cut import require_cuttable
from taut_deploy.compress.shrink.importance import decoder_of
from taut_deploy.compress.shrink.shrink import require_dense
from taut_deploy.compress.skeleton import empty_model
from taut_deploy.compress.source.decoder import take_experts_apart
from taut_deploy.compress.source.linears import linear_layers
from taut_deploy.compress.stages import BLOCK_STAGES
from taut_deploy.compress.train.job import require_shared
from taut_deploy.compress.train.optimizer import require_optimizer
from taut_deploy.compress.train.quantized_layers import require_trained
from taut_deploy.compress.train.text import describe_sources
from taut_deploy.errors import RecipeError
from taut_deploy.models.directory import require_within_context
from taut_deploy.models.pretrained import load_config
from taut_deploy.recipe import Distil, Order, Qat, Rotate, Slim, Training

# Master weight, gradient and two moments in fp32, of every number that is trained.
_TRAINED_BYTES = 16


def plan(job: CompressionJob, served_by: str = "here") -> CompressionPlan:
    """What :func:`taut_deploy.compress.pipeline.compress` would do.

    Args:
        job: what is asked for; its output is not touched.
        served_by: whose kernels each layer is told: ``here``, ``cpu``, ``h100`` or ``h200``.

    Raises:
        RecipeError: the recipe does not fit the model, or a text cannot be read.
        ModelError: the model cannot be read, or not be cut along an axis.
    """
    if not job.recipe.of_orders(Order.BEFORE, Order.AFTER):
        return driver.plan(job, served_by)
    require_usable(job)
    blocks = job.recipe.of_blocks()
    found = (
        _without_blocks(job)
        if blocks is None
        else driver.plan(replace(job, recipe=blocks), served_by)
    )
    _require_trainable(job, found.layers)
    slims = [stage for stage in job.recipe.stages if isinstance(stage, Slim)]
    parameters = found.bytes_before // stored_dtype(Path(job.model.path)).itemsize
    lines, memory = [], [found.peak_memory_bytes]
    itemsize = compute_dtype(stored_dtype(Path(job.model.path)), job.device).itemsize
    if slims:
        smaller = _slimmed(job, slims)
        memory.append(parameters * itemsize + _numbers(smaller) * itemsize)
        lines += [_slim_line(stage, memory[-1]) for stage in slims]
        found = _of_smaller(job, found, smaller)
        taught, parameters = parameters, _numbers(smaller)
    else:
        taught = parameters
    for stage in job.recipe.stages:
        if isinstance(stage, Rotate):
            found, line = _rotated(job, stage, found)
            lines.append(line)
            memory.append(found.peak_memory_bytes)
        if isinstance(stage, Training):
            memory.append(parameters * (_TRAINED_BYTES + itemsize) + taught * itemsize)
            lines.append(_training_line(stage, memory[-1], job.devices))
            # Each process reads both models whole before it keeps its part.
            memory.append(len(job.devices) * (4 * parameters + taught * itemsize))
    dense = len(job.recipe.of_orders(Order.BEFORE))
    return replace(
        found,
        recipe=job.recipe.name,
        peak_memory_bytes=max(memory),
        # Every step keeps its directory until the last one is done.
        disk_bytes=found.disk_bytes
        + (len(lines) - dense) * found.bytes_after
        + dense * found.bytes_before,
        whole_model=tuple(lines),
    )


def require_usable(job: CompressionJob) -> None:
    """Refuse what a stage could not read, import or share among devices.

    Raises:
        RecipeError: a text, a calibration that no stage can use, or a step that devices cannot
            share; names the field.
        OutputError: the package of an optimizer is not installed, or it cannot be shared.
    """
    recipe = job.recipe
    slims = any(isinstance(stage, Slim) for stage in recipe.stages)
    if slims and "self" in recipe.calibration.weights:
        raise RecipeError(
            "calibration.source: 'slim' measures on text; use 'corpus', or 'file' with 'path'"
        )
    longest = require_calibration_within_context(job)
    for index, stage in enumerate(recipe.stages):
        if isinstance(stage, Training):
            describe_sources(list(stage.text), f"stages.{index}.text")
            require_optimizer(stage.settings)
            require_shared(stage.settings, job.devices, f"stages.{index}")
            length = stage.settings.sequence_length
            require_within_context(longest, length, f"stages.{index}.sequence_length")


def _require_trainable(job: CompressionJob, layers: Iterable[LayerPlan]) -> None:
    """Refuse what the training after the blocks could not read.

    Raises:
        ModelError: naming the stage.
    """
    if not job.recipe.of_orders(Order.AFTER):
        return
    dtype = stored_dtype(Path(job.model.path))
    for index, stage in enumerate(job.recipe.stages):
        widths = {layer.shape[1] for layer in layers if layer.scheme and stage.selects(layer.name)}
        if stage.order is not Order.STORE or not widths:
            continue
        choose = BLOCK_STAGES[stage.method].choose_format
        if choose is not None:
            found = choose(stage, widths, dtype)
            if isinstance(found, WeightFormat):
                require_trained(found.scheme([]), f"stages.{index}")
            elif not isinstance(found, LowRankFormat) or found.base is not None:
                raise RecipeError(
                    f"stages.{index}: {found.name} layers cannot be trained; leave the training out"
                )


def _without_blocks(job: CompressionJob) -> CompressionPlan:
    """The plan of a recipe that only slims and trains: the model's own sizes."""
    stream = open_stream(job)
    size = sum(file.stat().st_size for file in Path(job.model.path).glob("*.safetensors"))
    return CompressionPlan(
        recipe=job.recipe.name,
        scheme="dense",
        group_size=None,
        blocks=len(stream.blocks),
        block_names=tuple(block.name for block in stream.blocks),
        layers=(),
        bytes_before=size,
        bytes_after=size,
        disk_bytes=0,
    )


def _slimmed(job: CompressionJob, slims: list[Slim]) -> Any:
    """The smaller model without weights; which units stay does not change its shapes."""
    directory = Path(job.model.path)
    trusted = job.trust_remote_code
    require_dense(directory)
    config = load_config(directory, trust_remote_code=trusted)
    smaller = empty_model(config, stored_dtype(directory), trust_remote_code=trusted)
    for stage in slims:
        for axis in (axis for axis in AXES if axis in stage.shares):
            with named_as_keys():
                target = target_of(config, axis, stage.shares[axis])
                require_cuttable(smaller, target)
            config = target.config
            if axis == "depth":
                config = keep_blocks(config, target.before, list(range(target.after)))
            smaller = empty_model(config, stored_dtype(directory), trust_remote_code=trusted)
    return smaller


def _of_smaller(job: CompressionJob, found: CompressionPlan, smaller: Any) -> CompressionPlan:
    """The plan's layers and sizes as they are after slimming.

    Raises:
        RecipeError: the block stages do not fit the smaller model.
    """
    dtype = stored_dtype(Path(job.model.path))
    take_experts_apart(smaller)
    prefix, modules = decoder_of(smaller)
    names = tuple(f"{prefix}.{index}" for index in range(len(modules)))
    after = _numbers(smaller) * dtype.itemsize
    found = replace(found, blocks=len(names), block_names=names, bytes_after=after)
    blocks = job.recipe.of_blocks()
    if blocks is None:
        return found
    shapes = {
        f"{name}.{inner}": (layer.out_features, layer.in_features)
        for name, block in zip(names, modules, strict=True)
        for inner, layer in linear_layers(block)
    }
    outer = frozenset(name for name, _ in linear_layers(smaller)) - shapes.keys()
    treatments = resolve(shapes, blocks, dtype, outer)
    layers = tuple(layer_plan(one, blocks, dtype.itemsize) for one in treatments.values())
    saved = sum(layer.bytes - layer.bytes_before for layer in layers)
    return replace(found, layers=layers, bytes_after=after + saved)


def _numbers(model: torch.nn.Module) -> int:
    """Of a model's parameters, tied ones once."""
    return sum(math.prod(value.shape) for value in model.parameters())


def _rotated(
    job: CompressionJob, stage: Rotate, found: CompressionPlan
) -> tuple[CompressionPlan, str]:
    """The plan with what an untied head adds, and what it says of that.

    Raises:
        RecipeError: the model cannot be turned.
    """
    grown = rehearse_rotation(job, stage)
    untied = f"; embeddings and head are untied, {grown / 1e6:.1f} MB more" if grown else ""
    # Turned part by part in fp32; embeddings and head stay.
    memory = found.peak_memory_bytes + 4 * grown // stored_dtype(Path(job.model.path)).itemsize
    found = replace(
        found,
        bytes_after=found.bytes_after + grown,
        disk_bytes=found.disk_bytes + 2 * grown,
        peak_memory_bytes=memory,
    )
    return found, f"rotate: the residual stream and the heads' values{untied}"


def _slim_line(stage: Slim, memory: int) -> str:
    shares = ", ".join(f"{share:.0%} of {axis}" for axis, share in stage.shares.items())
    return f"slim: keeps {shares}; both models in memory, {memory / 1e9:.1f} GB"


def _training_line(stage: Distil | Qat, memory: int, devices: Sequence[str]) -> str:
    settings = stage.settings
    rows = min(settings.micro_batch, settings.batch_size)
    shared = f" on each of {', '.join(devices)}, which hold a part each" if devices else ""
    return (
        f"{stage.method}: {settings.steps * settings.batch_size * settings.sequence_length} tokens "
        f"of {', '.join(stage.text)}; student and base in memory, {memory / 1e9:.1f} GB, and the "
        f"activations of {rows} sequences of {settings.sequence_length}{shared}"
    )
