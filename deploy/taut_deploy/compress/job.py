"""A compression job: what is asked for, what identifies its result, and whether that exists."""

import importlib.metadata
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taut_deploy.checkpoint import Manifest, is_checkpoint, read_manifest, require_public_name
from taut_deploy.compress.calibrate.texts import describe_text
from taut_deploy.compress.source.packed import why_not_read
from taut_deploy.compress.source.stream import StreamedModel
from taut_deploy.compress.source.weights import WeightReader
from taut_deploy.compress.workspace import remove_leftovers
from taut_deploy.cpu_products import has_products
from taut_deploy.errors import ModelError, OutputError
from taut_deploy.files import place_not_finite
from taut_deploy.models.directory import read_config, read_shape, require_within_context
from taut_deploy.models.store import ModelRecord
from taut_deploy.recipe import Recipe

_LIBRARIES = ("taut", "torch", "transformers", "compressed-tensors", "safetensors")


@dataclass(frozen=True)
class CompressionJob:
    """One request to compress.

    Args:
        model: the base model on disk.
        recipe: what to do.
        output: checkpoint directory to make; must not exist, or be this very checkpoint.
        cache: where the calibration corpus is kept.
        device: ``cpu`` or ``cuda``.
        resume: continue what an interrupted run left.
        trust_remote_code: let the model's own Python code run.
        requantize: take a model whose weights were rounded already.
        workers: processes that share the blocks of a recipe that asks for weights alone; 0 to
            calibrate.
        devices: that share the batches of calibration, ``device`` first; empty for one.
    """

    model: ModelRecord
    recipe: Recipe
    output: Path
    cache: Path
    device: str = "cpu"
    resume: bool = True
    trust_remote_code: bool = False
    requantize: bool = False
    workers: int = 0
    devices: tuple[str, ...] = ()


def found_at_output(job: CompressionJob) -> Manifest | None:
    """The finished checkpoint if it is this very one, None if nothing is there.

    Raises:
        OutputError: something else stands in its place.
        CheckpointError: the manifest there cannot be read.
    """
    if job.output.is_symlink():
        raise OutputError(f"{job.output}: is a link; give the directory itself as --output")
    if not job.output.exists():
        return None
    if not is_checkpoint(job.output):
        if job.output.is_dir() and not any(job.output.iterdir()):
            return None  # the rename that publishes replaces an empty directory
        raise OutputError(
            f"{job.output}: exists and is not a taut checkpoint; choose another --output"
        )
    manifest = read_manifest(job.output)
    text = _calibration_text(job.recipe)
    if (
        manifest.recipe_hash == job.recipe.hash
        and manifest.base_model.get("digest") == job.model.digest
        and (text is None or text in str(manifest.calibration.get("description")))
    ):
        return manifest
    raise OutputError(
        f"{job.output}: holds a checkpoint of {manifest.base_model.get('name')} by recipe "
        f"{manifest.recipe.get('name')!r}; choose another --output or remove it"
    )


def finished_checkpoint(job: CompressionJob) -> Manifest | None:
    """What :func:`found_at_output` finds; what a run that was killed at its end left goes.

    Raises:
        OutputError: the output is something else.
        CheckpointError: the manifest there cannot be read.
    """
    manifest = found_at_output(job)
    if manifest is not None:
        remove_leftovers(job.output)
    return manifest


def open_stream(job: CompressionJob) -> StreamedModel:
    """The base model, its blocks still on disk.

    Raises:
        ModelError: the model cannot be read, or is quantised already.
    """
    directory = Path(job.model.path)
    trusted = job.trust_remote_code
    try:
        require_public_name(job.model.name)
    except ValueError as error:
        raise ModelError(f"{directory}: {error}; rename the directory") from error
    shape = read_shape(directory, trust_remote_code=trusted)
    if shape.quantization is not None:
        entry = read_config(directory)["quantization_config"]
        if (reason := why_not_read(entry, requantize=job.requantize)) is not None:
            raise ModelError(
                f"{directory}: its config.json says it is quantised already "
                f"({shape.quantization}); {reason}"
            )
    if (place := place_not_finite(read_config(directory))) is not None:
        raise ModelError(
            f"{directory / 'config.json'}: {place} is NaN or infinity, which JSON lacks; "
            "give it a number"
        )
    dtype = compute_dtype(stored_dtype(directory), job.device)
    stream = StreamedModel(directory, dtype, torch.device(job.device), trust_remote_code=trusted)
    stream.rehearse()
    if shape.max_position_embeddings < 1:
        raise ModelError(
            f"{directory / 'config.json'}: max_position_embeddings: the longest context is not "
            "said; give it in tokens"
        )
    return stream


def require_calibration_within_context(job: CompressionJob) -> int:
    """Refuse calibration sequences that are longer than the model reads; returns how many it does.

    Raises:
        RecipeError: they are.
    """
    shape = read_shape(Path(job.model.path), trust_remote_code=job.trust_remote_code)
    longest, length = shape.max_position_embeddings, job.recipe.calibration.sequence_length
    require_within_context(longest, length, "calibration.sequence_length")
    return longest


def open_checked_stream(job: CompressionJob) -> StreamedModel:
    """The same for a process of a run that opened the model before: nothing is checked again."""
    directory = Path(job.model.path)
    dtype = compute_dtype(stored_dtype(directory), job.device)
    return StreamedModel(
        directory,
        dtype,
        torch.device(job.device),
        trust_remote_code=job.trust_remote_code,
        checked=True,
    )


def stored_dtype(directory: Path) -> torch.dtype:
    """The dtype ``config.json`` names; where it names none, that of most of the weights.

    Raises:
        ModelError: a shard cannot be read.
    """
    config = read_config(directory)
    name = str(config.get("dtype") or config.get("torch_dtype") or _most_common(directory))
    dtype = getattr(torch, name.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def _most_common(directory: Path) -> str:
    numbers = dict.fromkeys(("bfloat16", "float16", "float32"), 0)
    kinds = dict(zip(("BF16", "F16", "F32"), numbers, strict=True))
    for tensor in WeightReader(directory).stored.values():
        if tensor.dtype in kinds:
            numbers[kinds[tensor.dtype]] += math.prod(tensor.shape)
    return max(numbers, key=lambda name: numbers[name])


def compute_dtype(stored: torch.dtype, device: str) -> torch.dtype:
    """The dtype blocks compute in: the stored one, or fp32 where the CPU lacks products in it.

    Emulated ones take longer than fp32's (:mod:`taut_deploy.cpu_products`).

    Args:
        stored: of the model.
        device: ``cpu`` or ``cuda``.
    """
    half = stored in (torch.bfloat16, torch.float16)
    return torch.float32 if device == "cpu" and half and not has_products(stored) else stored


def fingerprint(job: CompressionJob) -> dict[str, Any]:
    """Everything that determines the bytes of the result."""
    # Threads and device change the order of sums, the CPU perhaps the dtype of products, and so the
    # bytes.
    directory = Path(job.model.path)
    return {
        "base_model": job.model.digest,
        "recipe_hash": job.recipe.hash,
        "calibration_text": _calibration_text(job.recipe),
        "libraries": library_versions(),
        "device": job.device,
        "threads": torch.get_num_threads(),
        "dtype": str(compute_dtype(stored_dtype(directory), job.device)),
        **({"by_weights": True} if job.workers else {}),
        **({"devices": list(job.devices)} if job.devices else {}),
    }


def _calibration_text(recipe: Recipe) -> str | None:
    """What identifies a calibration file's content, None for the other sources."""
    path = recipe.calibration.path
    return describe_text(Path(path)) if path is not None else None


def library_versions() -> dict[str, str]:
    """Versions of what computes and writes."""
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}
