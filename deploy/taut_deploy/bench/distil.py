"""``taut bench distil``: what each way of compressing costs, and what distillation wins back."""

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from taut_deploy.bench.distil_report import RESULTS, Row
from taut_deploy.bench.distil_students import STUDENTS, Place, Student
from taut_deploy.bench.distil_texts import (
    SELF,
    TextSet,
    require_apart,
    sample_self,
    source_ids,
)
from taut_deploy.bench.judge import Judge
from taut_deploy.compress.train.distil import DistilJob, distil
from taut_deploy.compress.train.settings import TrainSettings
from taut_deploy.errors import RecipeError
from taut_deploy.files import sha256_json
from taut_deploy.models.store import describe_directory
from taut_deploy.progress import Say

# Steps of which the speed is taken; the first ones compile kernels.
_TIMED_STEPS, _WARM_STEPS = 8, 3
# Larger than any number of steps: a state is saved at the end alone.
_NEVER = 1 << 40


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        place: of the students.
        text: UTF-8 file to judge on.
        judged: sequences of it.
        sets: what is trained on.
        students: names of :data:`.distil_students.STUDENTS`.
        seconds: of training for each, or None where ``tokens`` is given.
        tokens: to train on instead.
        batch_size: sequences of one step.
        micro_batch: sequences in memory at a time.
        self_sequences: that the base model writes for a set with ``self``.
        work: folder of the students.
        output: folder of the results.
    """

    place: Place
    text: Path
    judged: int
    sets: tuple[TextSet, ...]
    students: tuple[str, ...]
    seconds: float | None
    tokens: int | None
    batch_size: int
    micro_batch: int
    self_sequences: int
    work: Path
    output: Path

    @property
    def hash(self) -> str:
        """Of everything that rows of one table must share."""
        base = {"base": self.place.base.digest, "text": str(self.text), "judged": self.judged}
        length = {"sequence_length": self.place.sequence_length, "batch_size": self.batch_size}
        budget = {"seconds": self.seconds, "tokens": self.tokens, "own": self.self_sequences}
        calibration = {"calibration": self.place.calibration, "sequences": self.place.sequences}
        fit = {"fit_steps": self.place.fit_steps}
        return sha256_json({**base, **length, **budget, **calibration, **fit})[:16]


def choose_students(names: str) -> tuple[str, ...]:
    """Read names with commas, or ``all``.

    Raises:
        RecipeError: there is no such student.
    """
    chosen = tuple(STUDENTS) if names == "all" else tuple(names.split(","))
    for name in chosen:
        if name not in STUDENTS:
            known = ", ".join(STUDENTS)
            raise RecipeError(f"--only: no student is called {name[:40]!r}; there are {known}")
    return chosen


def measure(plan: Plan, say: Say) -> list[Row]:
    """Make, judge, train and judge again; rows that an earlier run wrote are not measured again.

    Every row is on disk as soon as it is known.

    Raises:
        RecipeError: a text is unreadable, too short, or holds what is judged.
        CouldNotValidateError: the judged text or a model cannot be read.
    """
    place = plan.place
    judge = Judge(
        Path(place.base.path), plan.text, plan.judged, place.sequence_length, place.device
    )
    texts = _apart(plan, judge.tokens)
    done = {(row.student, row.text) for row in RESULTS.read(plan.output, plan.hash)}
    for name in plan.students:
        missing = [one for one in plan.sets if (name, one.name) not in done]
        if not missing:
            continue
        student, directory = STUDENTS[name], plan.work / name
        started = time.monotonic()
        student.make(plan.place, directory)
        made = time.monotonic() - started
        one_shot = judge(directory)
        say(f"{name}: made in {made:.0f} s, one shot {one_shot}")
        for text in missing:
            sources = _sources(plan, text, texts)
            found = _distilled(plan, student, directory, sources, judge)
            row = Row(name, student.what, text.name, plan.hash, one_shot, made, **found)
            RESULTS.append(plan.output, row)
            say(json.dumps(asdict(row), allow_nan=False))
    return RESULTS.read(plan.output, plan.hash)


def _apart(plan: Plan, judged: Any) -> dict[str, Any]:
    """Tokens of every source that is trained or calibrated on, none of them judged."""
    place = plan.place
    sources = {source for one in plan.sets for source in one.written} | {place.calibration}
    found = {}
    for source in sorted(sources):
        found[source] = source_ids(
            source, Path(place.base.path), place.cache, place.sequence_length
        )
        require_apart(source, found[source], judged)
    return found


def _sources(plan: Plan, text: TextSet, ids: dict[str, Any]) -> tuple[str, ...]:
    """The sources of a set, what the base writes itself as a file."""
    if SELF not in text.sources:
        return text.sources
    place, file = plan.place, plan.work / f"self-{text.name}-{plan.hash}.npy"
    if not file.is_file():
        prompts = np.concatenate([ids[source] for source in text.written])
        sample_self(
            place.base, prompts, plan.self_sequences, place.sequence_length, place.device, file
        )
    return (*text.written, str(file))


def _distilled(
    plan: Plan, student: Student, directory: Path, sources: tuple[str, ...], judge: Judge
) -> dict[str, Any]:
    """Train the student, judge it, and drop it."""
    tokens = plan.tokens
    if tokens is None:
        rate = _tokens_per_second(plan, student, directory, sources)
        tokens = max(1, int(rate * float(plan.seconds or 0)))
    settings = _settings(plan, student, tokens)
    with tempfile.TemporaryDirectory(dir=plan.work) as work:
        output = Path(work) / "distilled"
        started = time.monotonic()
        _train(plan, directory, sources, settings, output)
        took = time.monotonic() - started
        return {
            "distilled": judge(output),
            "tokens": settings.steps * settings.batch_size * settings.sequence_length,
            "seconds": took,
            "settings": student.settings,
        }


def _tokens_per_second(
    plan: Plan, student: Student, directory: Path, sources: tuple[str, ...]
) -> float:
    """Speed of training, by a few steps that are thrown away."""
    step = plan.batch_size * plan.place.sequence_length
    settings = _settings(plan, student, _TIMED_STEPS * step)
    ticks: list[float] = []
    with tempfile.TemporaryDirectory(dir=plan.work) as work:
        _train(plan, directory, sources, settings, Path(work) / "timed", ticks)
    steps = ticks[:_TIMED_STEPS]  # what comes after them is the writing
    return (_TIMED_STEPS - _WARM_STEPS) * step / (steps[-1] - steps[_WARM_STEPS - 1])


def _settings(plan: Plan, student: Student, tokens: int) -> TrainSettings:
    return TrainSettings(
        tokens=tokens,
        sequence_length=plan.place.sequence_length,
        batch_size=plan.batch_size,
        micro_batch=plan.micro_batch,
        held_out=0,
        state_every=_NEVER,
        **student.settings,
    )


def _train(
    plan: Plan,
    directory: Path,
    sources: tuple[str, ...],
    settings: TrainSettings,
    output: Path,
    ticks: list[float] | None = None,
) -> None:
    place = plan.place
    job = DistilJob(
        describe_directory(directory),
        place.base,
        output,
        sources,
        settings,
        place.cache,
        place.device,
        resume=False,
    )
    distil(job, lambda *_: None if ticks is None else ticks.append(time.monotonic()))
