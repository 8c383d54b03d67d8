"""One block compressed and written on trial, so that a plan refuses what the run would."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from taut_deploy.compress.block import compress_block
from taut_deploy.compress.calibrate.calibration import make_calibration_set
from taut_deploy.compress.golden import ordinary_tokens
from taut_deploy.compress.job import CompressionJob
from taut_deploy.compress.resolve import Treatment
from taut_deploy.compress.source.calls import call_block
from taut_deploy.compress.source.stream import StreamedModel
from taut_deploy.compress.stored_block import tensors_of
from taut_deploy.compress.workspace import write_tensors
from taut_deploy.errors import CheckpointError
from taut_deploy.recipe import Recipe

_SEQUENCES, _LENGTH = 4, 64


def dry_run(
    job: CompressionJob,
    stream: StreamedModel,
    treatments: Mapping[str, Treatment],
    dtype: torch.dtype,
) -> None:
    """Compress the block of most weights on a little text and write it to a temporary directory.

    Args:
        job: what is asked for.
        stream: its model; the block is of no use afterwards.
        treatments: of every linear layer.
        dtype: of the model's weights.

    Raises:
        RecipeError: there is too little calibration text, or a stage cannot act on the block.
        ModelError: the block cannot be compressed.
        CheckpointError: what was written does not read back.
    """
    tokens = _tokens(job)
    block = max(stream.blocks, key=lambda one: sum(p.numel() for p in one.module.parameters()))
    hidden, arguments = stream.enter(tokens)
    hidden = hidden.clone()  # learned rounding needs gradients, which inference mode's lacks
    stream.load(block.module, block.name)
    with torch.inference_mode():
        target = call_block(block.module, hidden, arguments[block.index])
    result = compress_block(
        block.module,
        block.name,
        hidden,
        arguments[block.index],
        recipe=_short(job.recipe),
        treatments=treatments,
        dtype=dtype,
        batch_size=_SEQUENCES,
        target=target if job.recipe.needs_target else None,
    )
    with torch.inference_mode():
        call_block(block.module, hidden, arguments[block.index])
    tensors = stream.to_stored(tensors_of(block, result, dtype))
    with tempfile.TemporaryDirectory(prefix="taut-plan-") as folder:
        file = Path(folder) / "block.safetensors"
        write_tensors(file, tensors)
        read = load_file(file)
    if any(not torch.equal(read[name], value.cpu()) for name, value in tensors.items()):
        raise CheckpointError(f"{block.name}: what was written on trial does not read back")
    stream.release(block.module)


def _short(recipe: Recipe) -> Recipe:
    """The recipe with one step where it learns."""
    stages = (
        stage.model_copy(update={"steps": 1}) if stage.needs_target else stage
        for stage in recipe.stages
    )
    return recipe.model_copy(update={"stages": tuple(stages)})


def _tokens(job: CompressionJob) -> torch.Tensor:
    """[B, T] token ids: the calibration file's own, else ids from all over the vocabulary."""
    directory = Path(job.model.path)
    if job.recipe.calibration.source == "file":
        made = make_calibration_set(
            job.recipe.calibration,
            directory,
            job.cache,
            trust_remote_code=job.trust_remote_code,
        )
        return made.tokens[:_SEQUENCES, :_LENGTH]
    known = ordinary_tokens(directory, trust_remote_code=job.trust_remote_code)
    count = _SEQUENCES * _LENGTH
    spread = torch.linspace(0, len(known) - 1, count).long()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return known[spread][order].view(_SEQUENCES, _LENGTH)
