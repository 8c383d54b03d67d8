"""``taut compress``: whole-model stages before the blocks, the blocks, whole-model stages after.

A recipe of block stages alone is the driver's. For another one each step makes a model directory of
its own in ``.NAME.stages/`` beside the output, and the last of them becomes the output under one
manifest. A step that is finished is found finished by the next run; one that was interrupted goes
on as it does by itself.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from taut_deploy.checkpoint import MANIFEST, Manifest, read_manifest, seal
from taut_deploy.compress import driver
from taut_deploy.compress.equalize.rotate_model import rotate_model
from taut_deploy.compress.job import CompressionJob, fingerprint, finished_checkpoint
from taut_deploy.compress.pipeline_plan import plan
from taut_deploy.compress.shrink.axes import named_as_keys
from taut_deploy.compress.shrink.shrink import ShrinkJob, shrink
from taut_deploy.compress.train.distil import DistilJob, distil
from taut_deploy.compress.train.text import describe_sources
from taut_deploy.compress.workspace import sole_writer
from taut_deploy.documents import read_json
from taut_deploy.errors import OutputError
from taut_deploy.files import (
    disk_errors_named,
    fsync_path,
    require_free_space,
    write_json_atomically,
)
from taut_deploy.models.store import ModelRecord, describe_directory
from taut_deploy.recipe import Order, Rotate, Slim, Training
from taut_deploy.removal import is_own_child, remove_child

Progress = driver.Progress

_FINGERPRINT = "taut-stages.json"


def compress(job: CompressionJob, progress: Progress = lambda done, total, what: None) -> Manifest:
    """Compress ``job.model`` into ``job.output``; a finished identical one is returned as it is.

    Raises:
        OutputError: the output is not ours or belongs to another recipe, or the disk is full.
        RecipeError: the recipe does not fit the model, or a text cannot be read.
        ModelError: the model cannot be read.
        CheckpointError: what was written does not read back.
    """
    if not job.recipe.of_orders(Order.BEFORE, Order.AFTER):
        return driver.compress(job, progress)
    if (finished := _finished(job)) is not None:
        return finished
    with sole_writer(job.output, "taut compress"):
        return _finished(job) or _Run(job, progress).execute()


# Makes a directory of a model; returns its manifest, or None where it is but a step on the way.
_Make = Callable[[ModelRecord, Path, Progress], Manifest | None]


@dataclass(frozen=True)
class _Step:
    """One directory to make of the one before.

    Args:
        name: of the directory.
        method: as the manifest says it.
        run: makes it.
    """

    name: str
    method: str
    run: _Make


class _Run:
    """State of one run."""

    def __init__(self, job: CompressionJob, progress: Progress) -> None:
        self._foreseen = plan(job)  # refuses what a later step would, before the first
        self._job, self._progress = job, progress
        self._folder = job.output.parent / _folder_name(job.output)
        self._rounded = job.model  # the dense model that the block stages take
        self._open()

    def execute(self) -> Manifest:
        """Run every step that is not finished yet, and publish the last one."""
        steps = self._steps()
        if not (self._folder / MANIFEST).is_file():
            require_free_space(self._job.output.parent, self._foreseen.disk_bytes)
            self._run(steps)
        return self._publish(self._folder / steps[-1].name)

    def _open(self) -> None:
        """Go on in the folder of an equal job, or make a new one."""
        folder, wanted = self._folder, _fingerprint(self._job)
        file = folder / _FINGERPRINT
        with disk_errors_named(folder):
            if folder.exists() or folder.is_symlink():
                if not is_own_child(folder, (_FINGERPRINT,)):
                    raise OutputError(f"{folder}: exists and was not made by taut; move it away")
                equal = file.is_file() and read_json(file, OutputError) == wanted
                if self._job.resume and equal:
                    return
                remove_child(folder.parent, folder.name, (_FINGERPRINT,))
            folder.mkdir(parents=True)
            write_json_atomically(file, wanted)

    def _steps(self) -> list[_Step]:
        recipe = self._job.recipe
        steps: list[tuple[str, _Make]] = [
            (one.method, self._slim(one) if isinstance(one, Slim) else self._rotate(one))
            for one in recipe.stages
            if isinstance(one, Slim | Rotate)
        ]
        if recipe.of_blocks() is not None:
            steps.append(("blocks", self._blocks))
        trainings = [one for one in recipe.stages if isinstance(one, Training)]
        steps += [(one.method, self._training(one)) for one in trainings]
        return [_Step(f"{i}-{method}", method, run) for i, (method, run) in enumerate(steps)]

    def _run(self, steps: list[_Step]) -> None:
        """Make every directory; then the manifest, after which only renames are left."""
        record = self._job.model
        made: dict[str, Manifest] = {}
        for number, step in enumerate(steps, 1):
            output = self._folder / step.name
            if step.method == "blocks":
                self._rounded = record
            manifest = step.run(record, output, self._told(f"{number}/{len(steps)}", step))
            if manifest is not None:
                made[step.name] = manifest
            record = describe_directory(output)
        joined = _joined(self._job, steps, made)
        write_json_atomically(self._folder / MANIFEST, asdict(joined))

    def _publish(self, last: Path) -> Manifest:
        manifest = read_manifest(self._folder)
        final = self._folder / "final"
        with disk_errors_named(self._job.output):
            if last.exists():
                last.rename(final)
            sealed = seal(final, manifest)
            final.rename(self._job.output)
            fsync_path(self._job.output.parent)
        remove_child(self._folder.parent, self._folder.name, (_FINGERPRINT,))
        return sealed

    def _told(self, place: str, step: _Step) -> Progress:
        return lambda done, total, what: self._progress(
            done, total, f"step {place}, {step.method}: {what}"
        )

    def _slim(self, stage: Slim) -> _Make:
        def run(model: ModelRecord, output: Path, progress: Progress) -> Manifest:
            job, settings = self._job, self._job.recipe.calibration
            with named_as_keys():
                return shrink(
                    ShrinkJob(
                        model,
                        output,
                        stage.shares,
                        settings.texts,
                        job.cache,
                        settings.sequences,
                        settings.sequence_length,
                        job.device,
                        job.trust_remote_code,
                    ),
                    progress,
                )

        return run

    def _rotate(self, stage: Rotate) -> _Make:
        def run(model: ModelRecord, output: Path, progress: Progress) -> None:
            rotate_model(replace(self._job, model=model), stage, output, progress)

        return run

    def _blocks(self, model: ModelRecord, output: Path, progress: Progress) -> Manifest:
        recipe = self._job.recipe.of_blocks() or self._job.recipe
        return driver.compress(
            replace(self._job, model=model, recipe=recipe, output=output), progress
        )

    def _training(self, stage: Training) -> _Make:
        def run(model: ModelRecord, output: Path, progress: Progress) -> Manifest:
            job = self._job
            turned = any(isinstance(one, Rotate) for one in job.recipe.stages)
            return distil(
                DistilJob(
                    model,
                    # Alike in what they give; states are compared in the student's basis.
                    self._rounded if stage.hidden and turned else job.model,
                    output,
                    stage.text,
                    stage.settings,
                    job.cache,
                    job.device,
                    job.resume,
                    job.trust_remote_code,
                    job.devices,
                    None if self._rounded is job.model else self._rounded,
                ),
                progress,
            )

        return run


def _folder_name(output: Path) -> str:
    return f".{output.name}.stages"


def _joined(job: CompressionJob, steps: list[_Step], made: dict[str, Manifest]) -> Manifest:
    """One manifest of all steps: the last one's, of the base model and the whole recipe."""
    last = made[steps[-1].name]
    slimmed = [entry for step in steps if step.method == "slim" for entry in made[step.name].layers]
    calibrated = [step for step in steps if step.method in {"slim", "blocks"}]
    # What trains takes the layers of its student along; blocks begin a list of their own.
    layers = last.layers
    if any(step.method == "blocks" for step in steps):
        layers = slimmed + layers
    return replace(
        last,
        name=job.model.name,
        recipe={
            **job.recipe.as_json(),
            "results": [_result(one, made.get(one.name)) for one in steps],
        },
        recipe_hash=job.recipe.hash,
        base_model={
            "name": job.model.name,
            "digest": job.model.digest,
            "source": job.model.source,
        },
        calibration=made[calibrated[-1].name].calibration,
        layers=layers,
        files={},
        bytes=0,
    )


def _result(step: _Step, manifest: Manifest | None) -> dict[str, Any]:
    """What a step measured of itself, and the text it did it with."""
    if manifest is None:
        return {"method": step.method}
    measured = ("held_out", "held_out_cross_entropy", "trained_tokens")
    found = {key: manifest.recipe[key] for key in measured if key in manifest.recipe}
    text = {f"text_{key}": manifest.calibration[key] for key in ("description", "hash")}
    return {"method": step.method, **found, **text}


def _fingerprint(job: CompressionJob) -> dict[str, Any]:
    return {**fingerprint(job), "training_texts": _texts(job)}


def _texts(job: CompressionJob) -> list[str]:
    """What identifies the text of each training stage."""
    return [
        describe_sources(list(stage.text), f"stages.{index}.text")
        for index, stage in enumerate(job.recipe.stages)
        if isinstance(stage, Training)
    ]


def _finished(job: CompressionJob) -> Manifest | None:
    """The finished checkpoint if it is this very one, its texts included; None if none is there.

    Raises:
        OutputError: something else stands in its place.
    """
    manifest = finished_checkpoint(job)
    if manifest is None:
        return None
    trained = [one for one in manifest.recipe.get("results", []) if "trained_tokens" in one]
    if [one.get("text_description") for one in trained] != _texts(job):
        raise OutputError(
            f"{job.output}: holds a checkpoint that was trained on other text; choose another "
            "--output or remove it"
        )
    # A run that was killed after its last rename may have left them.
    left = job.output.parent / _folder_name(job.output)
    if is_own_child(left, (_FINGERPRINT,)):
        remove_child(left.parent, left.name, (_FINGERPRINT,))
    return manifest
