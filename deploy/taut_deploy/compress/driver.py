"""The compression pipeline: stream the blocks, compress each, write it, remember where we are.

Peak memory is one block, its statistics, hidden states of the calibration, embeddings and head.
After every block its shard and the hidden states entering the next one are on disk, so a killed
run goes on where it was and ends in the same bytes: each is a function of the fingerprint.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from taut_deploy.checkpoint import Golden, Manifest, seal
from taut_deploy.compress.allocate.decide import allocation_of
from taut_deploy.compress.block import CompressedBlock, compress_block, run_batches, run_prompts
from taut_deploy.compress.by_weights import Parts, compress_by_weights, require_by_weights
from taut_deploy.compress.calibrate.calibration import CalibrationSet
from taut_deploy.compress.calibrate.kept import kept_calibration
from taut_deploy.compress.described import manifest_of
from taut_deploy.compress.free_memory import return_freed_memory
from taut_deploy.compress.golden import (
    choose_golden,
    ordinary_tokens,
    require_embedded,
    tokenize_prompts,
)
from taut_deploy.compress.hidden_states import CALIBRATION, EXACT, HiddenStates
from taut_deploy.compress.job import (
    CompressionJob,
    fingerprint,
    finished_checkpoint,
    open_stream,
    require_calibration_within_context,
    stored_dtype,
)
from taut_deploy.compress.kept_files import kept_files
from taut_deploy.compress.kv_cache import BlockCache
from taut_deploy.compress.mixed.decide import mixing_of
from taut_deploy.compress.outer import outer_tensors, quantization_entry
from taut_deploy.compress.plan import CompressionPlan, formats_of, make_plan, treatments_of
from taut_deploy.compress.replicas import require_batches
from taut_deploy.compress.report.write import write_log, write_report
from taut_deploy.compress.served import kernels_of
from taut_deploy.compress.shards import shard_index, shard_name
from taut_deploy.compress.source.calls import BlockArguments
from taut_deploy.compress.source.decoder import DecoderBlock
from taut_deploy.compress.source.stream import StreamedModel
from taut_deploy.compress.stored_block import tensors_of
from taut_deploy.compress.tables import RoundedTable, round_tables, tables_of
from taut_deploy.compress.threads import single_thread
from taut_deploy.compress.trial import try_block
from taut_deploy.compress.workspace import Workspace, sole_writer
from taut_deploy.files import copy_files, require_free_space, write_json_atomically
from taut_deploy.models.directory import read_config
from taut_deploy.recipe import Recipe

_BATCH_TOKENS = 2048

Progress = Callable[[int, int, str], None]  # blocks done, blocks in all, what is being done


def plan(job: CompressionJob, served_by: str = "here") -> CompressionPlan:
    """What :func:`compress` would do: one block is compressed and saved, and thrown away.

    Args:
        job: what is asked for; its output is not touched.
        served_by: whose kernels each layer is told: ``here``, ``cpu``, ``h100`` or ``h200``.

    Raises:
        RecipeError: if the recipe does not fit the model, or the calibration text is too short.
        ModelError: if the model cannot be read.
    """
    place = job.cache if job.cache.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="taut-plan-", dir=place) as folder:
        tried = replace(job, output=Path(folder) / "checkpoint")
        return _Run(tried, lambda done, total, what: None).rehearse(served_by)


def compress(job: CompressionJob, progress: Progress = lambda done, total, what: None) -> Manifest:
    """Compress ``job.model`` into ``job.output``; a finished identical one is returned as it is.

    Raises:
        OutputError: the output is not ours or belongs to another recipe, or the disk is full.
        RecipeError: the recipe does not fit the model.
        ModelError: the model cannot be read.
        CheckpointError: what was written does not read back.
    """
    if (finished := finished_checkpoint(job)) is not None:
        return finished
    with sole_writer(job.output, "taut compress"):
        # Whoever held the lock a moment ago may have finished the work.
        return finished_checkpoint(job) or _Run(job, progress, reserve=True).execute()


class _Run:
    """State of one run of the pipeline."""

    def __init__(self, job: CompressionJob, progress: Progress, *, reserve: bool = False) -> None:
        self._job = job
        self._progress = progress
        self._directory = Path(job.model.path)
        self._kept = kept_files(self._directory, with_code=job.trust_remote_code)
        self._stream = open_stream(job)
        require_calibration_within_context(job)
        self._dtype = stored_dtype(self._directory)
        mixing = mixing_of(self._stream, job.recipe, self._directory, self._dtype)
        if mixing is None:
            self._settle(job.recipe, reserve)
        scored = mixing or allocation_of(self._stream, job.recipe, self._dtype)
        self._devices = [torch.device(one) for one in job.devices]
        self._decided: dict[str, Any] = {}
        self._workspace = Workspace(job.output, fingerprint(job), job.resume)
        if scored is not None:
            recipe, self._decided = scored.decided(
                self._workspace, lambda: self._calibration().tokens, self._told("scoring")
            )
            self._settle(recipe, reserve)
        self._states = HiddenStates(self._workspace)
        self._rounded: list[RoundedTable] = []
        self._seconds: dict[str, float] = {}

    def _settle(self, recipe: Recipe, reserve: bool) -> None:
        """Work out what every layer gets, before anything is computed or written for it."""
        self._recipe = recipe
        self._treatments = treatments_of(self._stream, recipe, self._dtype)
        if self._job.workers:
            require_by_weights(self._job.recipe, self._treatments)
        sequences = recipe.calibration.sequences
        require_batches(len(self._job.devices), sequences, self._batch_size)
        formats = formats_of(self._treatments).values()
        self._tables = tables_of(self._stream.model, recipe, self._dtype, formats)
        self._plan = make_plan(self._stream, recipe, self._treatments, self._directory, self._dtype)
        if reserve:
            require_free_space(self._job.output.parent, self._plan.disk_bytes)

    def _told(self, what: str) -> Callable[[DecoderBlock], None]:
        total = len(self._stream.blocks)
        return lambda block: self._progress(block.index, total, f"{what} {block.name}")

    def rehearse(self, served_by: str) -> CompressionPlan:
        """Compress one block, and say what all of them will take."""
        tokens = ordinary_tokens(self._directory, trust_remote_code=self._job.trust_remote_code)
        require_embedded([tokens], _vocabulary(self._stream), self._directory)
        measured = try_block(
            self._stream.blocks,
            lambda: self._enter(self._calibration()),
            self._try_block,
            self._try_outer,
        )
        # Not before: what it imports is no part of a run's memory.
        kernels = kernels_of(self._treatments, read_config(self._directory), served_by)
        layers = tuple(replace(one, kernel=kernels[one.name]) for one in self._plan.layers)
        return replace(
            self._plan,
            layers=layers,
            devices=self._job.devices,
            peak_memory_bytes=measured.peak_memory_bytes * (1 + self._job.workers),
            device_memory_bytes=measured.device_memory_bytes,
            seconds=measured.seconds,
        )

    def _try_block(self, block: DecoderBlock, arguments: list[BlockArguments]) -> None:
        self._compress(block, arguments, 0)  # any input will do

    def _try_outer(self) -> None:
        self._load_outer()
        self._write_outer()

    def execute(self) -> Manifest:
        """Run every step that is not committed yet."""
        started = time.monotonic()
        calibration = self._calibration()
        total = len(self._stream.blocks)
        arguments = self._enter(calibration)
        reports: list[dict[str, Any]] = []
        if self._job.workers:
            parts = Parts(self._job, self._recipe, self._workspace)
            told = self._told("compressed")
            reports = compress_by_weights(parts, self._stream, self._treatments, arguments, told)
        for block in () if self._job.workers else self._stream.blocks:
            done = self._workspace.committed(f"block-{block.index}")
            if done is None:
                self._told("compressing")(block)
                clock = time.monotonic()
                done = self._compress(block, arguments, block.index)
                self._seconds[block.name] = round(time.monotonic() - clock, 3)
            reports += done
        self._progress(total, total, "writing the manifest")
        self._load_outer()
        golden = self._golden()
        self._write_outer()
        log = write_log(self._workspace, time.monotonic() - started, self._seconds)
        tables = {"tables": [one.as_json() for one in self._rounded]} if self._rounded else {}
        found = self._decided | tables
        manifest = manifest_of(self._job, self._treatments, calibration, reports, golden, found)
        write_report(self._workspace.directory, manifest, self._plan, log)
        manifest = seal(self._workspace.directory, manifest)
        self._workspace.publish()
        return manifest

    def _calibration(self) -> CalibrationSet:
        def told() -> None:
            self._progress(0, len(self._stream.blocks), "preparing calibration tokens")

        return kept_calibration(self._job, self._workspace, told)

    def _enter(self, calibration: CalibrationSet) -> list[BlockArguments]:
        """Record how blocks are called; save what enters block 0 unless we are past it.

        Returns one list of block arguments for the calibration and one for each golden prompt.
        """
        trusted = self._job.trust_remote_code
        prompts = tokenize_prompts(self._directory, trust_remote_code=trusted)
        require_embedded([calibration.tokens, *prompts], _vocabulary(self._stream), self._directory)
        streams = [calibration.tokens[:1], *prompts]
        fresh = self._workspace.committed("block-0") is None
        if fresh and self._recipe.needs_target:
            self._embed(calibration, EXACT)
        self._rounded = round_tables(self._stream.model, self._tables)
        entered = [self._stream.enter(tokens) for tokens in streams]
        if fresh:
            self._embed(calibration, CALIBRATION)
            self._states.save_prompts(0, [hidden for hidden, _ in entered[1:]])
        self._stream.release_outer()
        return [arguments for _, arguments in entered]

    def _embed(self, calibration: CalibrationSet, stream: str) -> None:
        batches = torch.split(calibration.tokens, self._batch_size)
        self._states.save(0, stream, len(calibration.tokens), map(self._stream.embed, batches))

    @property
    def _batch_size(self) -> int:
        return max(1, _BATCH_TOKENS // self._recipe.calibration.sequence_length)

    def _compress(
        self, block: DecoderBlock, arguments: list[BlockArguments], entering: int
    ) -> list[dict[str, Any]]:
        """Compress a block on what enters the one at ``entering``: itself, but in a trial."""
        self._stream.load(block.module, block.name)
        called = arguments[0][block.index]
        target = self._target(block, called, entering) if self._recipe.needs_target else None
        hidden = self._entering(entering, CALIBRATION)
        result = compress_block(
            block.module,
            block.name,
            hidden,
            called,
            recipe=self._recipe,
            treatments=self._treatments,
            dtype=self._dtype,
            batch_size=self._batch_size,
            target=target,
            devices=self._devices,
        )
        cache = BlockCache(self._recipe.kv_cache, block.module, block.name, self._dtype)
        with cache.observed():
            # Attention is watched in the block itself, not in its copies.
            shared = () if self._recipe.kv_cache else self._devices
            self._run(block, hidden, called, CALIBRATION, shared)
        device = torch.device(self._job.device)
        with cache.emulated():
            prompts = run_prompts(
                block.module,
                [prompt.to(device) for prompt in self._states.prompts(entering)],
                [calls[block.index] for calls in arguments[1:]],
            )
        self._states.save_prompts(block.index + 1, prompts)
        with single_thread():  # packing: element by element
            self._save_block(block, result, cache.tensors())
        reports = [report.as_json() for report in result.reports]
        self._workspace.commit(f"block-{block.index}", reports)
        self._states.drop(block.index)
        self._stream.release(block.module)
        return reports

    def _target(self, block: DecoderBlock, called: dict[str, Any], entering: int) -> torch.Tensor:
        """The original model's own stream [B, T, H], through the block as it was."""
        self._run(block, self._entering(entering, EXACT), called, EXACT, self._devices)
        return self._entering(block.index + 1, EXACT)

    def _entering(self, index: int, stream: str) -> torch.Tensor:
        """A text's states [B, T, H]: on the device, or where several take their batches from."""
        hidden = self._states.of(index, stream)
        return hidden if self._devices else hidden.to(self._job.device)

    def _run(
        self,
        block: DecoderBlock,
        hidden: torch.Tensor,
        called: dict[str, Any],
        stream: str,
        devices: Sequence[torch.device],
    ) -> None:
        """Save what a block gives for a text."""
        if not devices:
            hidden = hidden.to(self._job.device)
        batches = run_batches(block.module, hidden, called, self._batch_size, devices)
        self._states.save(block.index + 1, stream, len(hidden), batches)
        return_freed_memory()

    def _save_block(
        self, block: DecoderBlock, result: CompressedBlock, scales: dict[str, torch.Tensor]
    ) -> None:
        tensors = scales | tensors_of(block, result, self._dtype)
        self._workspace.save_shard(
            shard_name(block.index, len(self._stream.blocks)), self._stream.to_stored(tensors)
        )

    def _golden(self) -> Golden:
        device = torch.device(self._job.device)
        last = self._states.prompts(len(self._stream.blocks))
        return choose_golden(
            [self._stream.leave(prompt.to(device))[0, -1].cpu() for prompt in last],
            self._directory,
            trust_remote_code=self._job.trust_remote_code,
        )

    def _load_outer(self) -> None:
        """Take embeddings and head in again, which were released while blocks were worked on."""
        self._stream.load_outer()
        self._rounded = round_tables(self._stream.model, self._tables)

    def _write_outer(self) -> None:
        """Embeddings and head, the index, config.json and the files that are copied as they are."""
        target = self._workspace.directory
        outer = outer_tensors(self._stream, self._rounded)
        count = len(self._stream.blocks)
        self._workspace.save_shard(shard_name(count, count), outer)
        write_json_atomically(target / "model.safetensors.index.json", shard_index(target))
        copy_files(self._kept, self._directory, target)
        config = read_config(self._directory)
        config.pop("quantization_config", None)  # of a source that was read as numbers
        entry = quantization_entry(self._stream, self._recipe, self._treatments, self._tables)
        if entry is not None:
            config["quantization_config"] = entry
        write_json_atomically(target / "config.json", config)


def _vocabulary(stream: StreamedModel) -> int:
    return int(stream.model.get_input_embeddings().weight.shape[0])


__all__ = ["CompressionJob", "CompressionPlan", "compress", "plan"]
