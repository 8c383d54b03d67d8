"""A request to train, and the two models it is about."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taut_deploy.compress.dense import load_dense
from taut_deploy.compress.train.settings import TrainSettings
from taut_deploy.compress.train.student import Student, open_student
from taut_deploy.errors import ModelError, OutputError, RecipeError
from taut_deploy.models.directory import read_config
from taut_deploy.models.store import ModelRecord


@dataclass(frozen=True)
class DistilJob:
    """One request to train.

    Args:
        student: compressed checkpoint, pruned or shrunk model.
        teacher: the model it was made from, or None where the settings need none.
        output: checkpoint to make; must not exist, or be this very one.
        text: ``corpus``, or files.
        settings: of the training.
        cache: where the corpus is kept.
        device: ``cpu`` or ``cuda``.
        resume: continue what an interrupted run left.
        trust_remote_code: let the models' own Python code run.
        devices: that hold a part of the models each, ``device`` first; empty for one.
        rounded: dense model whose weights the student's codes were chosen for, which a start other
            than ``codes`` takes; the teacher if None.
    """

    student: ModelRecord
    teacher: ModelRecord | None
    output: Path
    text: tuple[str, ...]
    settings: TrainSettings
    cache: Path
    device: str = "cpu"
    resume: bool = True
    trust_remote_code: bool = False
    devices: tuple[str, ...] = ()
    rounded: ModelRecord | None = None


def require_shared(settings: TrainSettings, devices: Sequence[str], given_by: str) -> None:
    """Refuse devices that cannot share a training.

    Args:
        settings: of the training.
        devices: that are to share it; empty for one.
        given_by: flag or stage that the settings come from, for errors.

    Raises:
        OutputError: the optimizer keeps what cannot be held in parts.
        RecipeError: a step's micro-batches cannot be shared out evenly.
    """
    count = len(devices)
    if not count:
        return
    if settings.optimizer != "adamw":
        raise OutputError(
            f"--devices: {settings.optimizer} keeps moments of whole weights, which no device "
            f"holds; use optimizer adamw ({given_by})"
        )
    batches = settings.batch_size // min(settings.micro_batch, settings.batch_size)
    if batches % count:
        raise RecipeError(
            f"--devices: {count} devices for {batches} micro-batches of a step; let batch_size "
            f"({settings.batch_size}) over micro_batch ({settings.micro_batch}) be a multiple of "
            f"{count} ({given_by})"
        )


def open_models(job: DistilJob, held_on: str | None = None) -> tuple[Student, Any | None]:
    """The student, ready to be trained, and the teacher.

    Args:
        job: what is asked for.
        held_on: device of the weights until they are moved; the job's if None.

    Raises:
        ModelError: one cannot be read or trained.
    """
    teacher = None if job.teacher is None else _load_teacher(job, held_on)
    rounded = job.rounded or job.teacher
    student = open_student(
        Path(job.student.path),
        job.settings,
        job.device,
        rounded=None if rounded is None else Path(rounded.path),
        trust_remote_code=job.trust_remote_code,
        held_on=held_on,
    )
    for value in student.model.parameters():
        value.requires_grad_(False)
    for value in student.trained(job.settings).values():
        value.requires_grad_(True)
    if job.settings.gradient_checkpointing:
        student.model.gradient_checkpointing_enable({"use_reentrant": False})
    return student, teacher


def _load_teacher(job: DistilJob, held_on: str | None) -> Any:
    directory = Path(str(job.teacher and job.teacher.path))
    entry = read_config(directory).get("quantization_config")
    if entry is not None:
        raise ModelError(
            f"--teacher {directory}: is quantised itself; give the model it was made from"
        )
    return load_dense(
        directory, job.device, trust_remote_code=job.trust_remote_code, held_on=held_on
    )
