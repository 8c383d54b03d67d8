"""Blocks whose compression asks nothing but their weights, shared out to several processes.

Each process holds one block, on one thread, and writes its shard. A shard is a function of the
block's weights alone, so that neither the number of processes nor their order changes a byte.
Golden prompts then run through the stored blocks, one after another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from taut_deploy.compress.block import compress_block, run_prompts
from taut_deploy.compress.child_process import context_for, end_with_parent
from taut_deploy.compress.formats.protocol import StoredCodes, WeightFormat
from taut_deploy.compress.hidden_states import HiddenStates
from taut_deploy.compress.job import CompressionJob, open_checked_stream, stored_dtype
from taut_deploy.compress.plan import treatments_of
from taut_deploy.compress.resolve import Treatment
from taut_deploy.compress.shards import shard_name
from taut_deploy.compress.source.calls import BlockArguments
from taut_deploy.compress.source.decoder import DecoderBlock
from taut_deploy.compress.source.linears import linear_layers
from taut_deploy.compress.source.stream import StreamedModel
from taut_deploy.compress.state import round_inputs
from taut_deploy.compress.stored_block import tensors_of
from taut_deploy.compress.tensor_file import write_tensors
from taut_deploy.compress.workspace import Workspace
from taut_deploy.errors import OutputError, RecipeError
from taut_deploy.recipe import Quantize, Recipe

_ALGORITHMS = ("rtn", "hqq")


def require_by_weights(recipe: Recipe, treatments: Mapping[str, Treatment]) -> None:
    """Refuse ``--workers`` for a recipe that looks at what layers read.

    Raises:
        RecipeError: naming what does.
    """
    for index, stage in enumerate(recipe.stages):
        if not isinstance(stage, Quantize) or stage.algorithm not in _ALGORITHMS:
            told = stage.algorithm if isinstance(stage, Quantize) else stage.method
            raise RecipeError(
                f"--workers: {recipe.place(index)} ({told}) looks at inputs, which pass from block "
                "to block; only 'quantize' with 'algorithm' rtn or hqq is shared among processes"
            )
    if recipe.kv_cache is not None:
        raise RecipeError("--workers: 'kv_cache' is followed from block to block; leave one out")
    for name, one in treatments.items():
        if isinstance(one.format, WeightFormat) and (
            one.format.activations.scale(torch.ones(1)) is not None
        ):
            raise RecipeError(
                f"--workers: {name}: {one.format.name} has scales of inputs fixed beforehand, "
                "which are calibrated; leave one out"
            )


@dataclass(frozen=True)
class Parts:
    """What a run shares with its processes.

    Args:
        job: with the number of processes.
        recipe: of blocks, decided.
        workspace: of the run; shards are written there.
    """

    job: CompressionJob
    recipe: Recipe
    workspace: Workspace


def compress_by_weights(
    parts: Parts,
    stream: StreamedModel,
    treatments: Mapping[str, Treatment],
    arguments: Sequence[BlockArguments],
    told: Callable[[DecoderBlock], None],
) -> list[dict[str, Any]]:
    """Compress every block that is not committed yet, then run the golden prompts through all.

    A block is committed once its shard is on disk; what leaves the last one is saved in the
    workspace as the calibrated run does.

    Args:
        parts: of the run.
        stream: the model.
        treatments: of its layers.
        arguments: recorded for a nominal calibration, then for each golden prompt.
        told: told each block that is done.

    Returns:
        The reports of all layers, in the model's order.

    Raises:
        OutputError: the disk is full, or a process was killed.
        ModelError: a weight is not finite; names the layer.
    """
    blocks, workspace = stream.blocks, parts.workspace
    missing = [one.index for one in blocks if workspace.committed(_step(one)) is None]
    for index, reports in _compressed(parts, missing) if missing else ():
        workspace.commit(_step(blocks[index]), reports)
        told(blocks[index])
    states = HiddenStates(workspace)
    prompts = states.prompts(0)
    leaving = _run_stored(stream, treatments, workspace.directory, prompts, arguments[1:])
    states.save_prompts(len(blocks), leaving)
    return [report for one in blocks for report in workspace.committed(_step(one))]


def _step(block: DecoderBlock) -> str:
    return f"block-{block.index}"


def _compressed(parts: Parts, indices: Sequence[int]) -> Iterator[tuple[int, list[Any]]]:
    """Each block's position and its reports, as they are done."""
    count = min(parts.job.workers, len(indices))
    context = context_for([parts.job.device])
    with ProcessPoolExecutor(count, context, _open, (parts,)) as pool:
        waiting = [pool.submit(_compress, index) for index in indices]
        broken: BrokenProcessPool | None = None
        try:
            for done in as_completed(waiting):
                try:
                    found = done.result()
                except BrokenProcessPool as error:
                    broken = error  # blocks that were done before may come after it
                    continue
                yield found
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    if broken is not None:
        raise OutputError(
            f"--workers {count}: a process ended while it compressed, most likely for want of "
            "memory; run again with fewer, finished blocks are kept"
        ) from broken


class _Process:
    """What one process holds: the model, its blocks on disk."""

    def __init__(self, parts: Parts) -> None:
        torch.set_num_threads(1)
        self._parts = parts
        self._stream = open_checked_stream(parts.job)
        self._dtype = stored_dtype(Path(parts.job.model.path))
        self._treatments = treatments_of(self._stream, parts.recipe, self._dtype)

    def compress(self, index: int) -> tuple[int, list[dict[str, object]]]:
        """Compress a block and write its shard."""
        block = self._stream.blocks[index]
        self._stream.load(block.module, block.name)
        result = compress_block(
            block.module,
            block.name,
            None,
            {},
            recipe=self._parts.recipe,
            treatments=self._treatments,
            dtype=self._dtype,
            batch_size=1,
        )
        tensors = self._stream.to_stored(tensors_of(block, result, self._dtype))
        write_tensors(
            self._parts.workspace.directory / shard_name(index, len(self._stream.blocks)), tensors
        )
        self._stream.release(block.module)
        return index, [report.as_json() for report in result.reports]


_processes: list[_Process] = []  # of this one, once it is opened


def _open(parts: Parts) -> None:
    end_with_parent()
    _processes.append(_Process(parts))


def _compress(index: int) -> tuple[int, list[dict[str, object]]]:
    return _processes[0].compress(index)


def _run_stored(
    stream: StreamedModel,
    treatments: Mapping[str, Treatment],
    directory: Path,
    probes: Sequence[torch.Tensor],
    arguments: Sequence[BlockArguments],
) -> list[torch.Tensor]:
    """What leaves the last block for each prompt [1, T, H], the blocks as they are stored."""
    hidden = list(probes)
    for block in stream.blocks:
        formats = {
            inner: one
            for inner, _ in linear_layers(block.module)
            if isinstance(one := treatments[f"{block.name}.{inner}"].format, WeightFormat)
        }
        # What is put in their place would be read for nothing.
        stream.load(block.module, block.name, {f"{inner}.weight" for inner in formats})
        _put_stored(stream, block, formats, directory)
        hidden = run_prompts(block.module, hidden, [calls[block.index] for calls in arguments])
        stream.release(block.module)
    return hidden


def _put_stored(
    stream: StreamedModel,
    block: DecoderBlock,
    formats: Mapping[str, WeightFormat],
    directory: Path,
) -> None:
    """Let a loaded block compute with the layers of its shard, by their names in the block."""
    tensors = load_file(directory / shard_name(block.index, len(stream.blocks)))
    for inner, layer_format in formats.items():
        layer = block.module.get_submodule(inner)
        prefix = f"{stream.stored_layer(f'{block.name}.{inner}')}."
        mine = {
            key.removeprefix(prefix): value
            for key, value in tensors.items()
            if key.startswith(prefix)
        }
        stored = StoredCodes(layer_format, layer_format.unpack(mine), None)
        weight = stored.dequantize().to(stream.dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        round_inputs(layer, stored.round_input)
