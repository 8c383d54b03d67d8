"""``taut distil``: train a student by its teacher or by text, and write it back as it was."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from taut_deploy.checkpoint import Manifest, is_checkpoint, read_manifest, seal
from taut_deploy.compress.golden import golden_of
from taut_deploy.compress.job import compute_dtype, library_versions, stored_dtype
from taut_deploy.compress.train.curve import CSV, PNG, write_curve
from taut_deploy.compress.train.export import write_checkpoint
from taut_deploy.compress.train.job import DistilJob, open_models, require_shared
from taut_deploy.compress.train.loop import STATE, Progress, Trainer, judge, restore_masters
from taut_deploy.compress.train.losses import Objective
from taut_deploy.compress.train.optimizer import require_optimizer
from taut_deploy.compress.train.parts import Alone
from taut_deploy.compress.train.ranks import run_ranks
from taut_deploy.compress.train.sharded import TEXT, train_rank
from taut_deploy.compress.train.student import Student
from taut_deploy.compress.train.text import TrainingText, read_text, require_in_vocabulary
from taut_deploy.compress.workspace import Workspace, finished_result, sole_writer
from taut_deploy.errors import ModelError
from taut_deploy.files import sha256_json, write_json_atomically
from taut_deploy.models.pretrained import load_tokenizer

# Stages after which a student's weights are the teacher's no more, though it computes alike.
_CHANGE_WEIGHTS = frozenset({"slim", "rotate", "smooth", "awq"})


@dataclass(frozen=True)
class _Trained:
    """What training left.

    Args:
        student: with the weights it ended with.
        workspace: of the run.
        history: of the loss, a row a step.
        held_out: losses before and after.
        fused: whether logits were never made.
    """

    student: Student
    workspace: Workspace
    history: list[list[float]]
    held_out: dict[str, dict[str, float]]
    fused: bool


def distil(job: DistilJob, progress: Progress = lambda done, total, what: None) -> Manifest:
    """Train ``job.student`` into ``job.output``; a finished identical one is returned as it is.

    Raises:
        OutputError: something else stands in the output's place, or the disk is full.
        ModelError: a model cannot be read or trained, or the two do not belong together.
        RecipeError: the text cannot be read or is too short.
    """
    if job.settings.needs_teacher and job.teacher is None:
        raise ModelError(
            "--teacher: give the model that the student was made from; without one only "
            "cross_entropy can be trained for"
        )
    require_shared(job.settings, job.devices, "--set")
    require_optimizer(job.settings)
    with sole_writer(job.output, "taut distil"):
        return _Run(job, progress).execute()


class _Run:
    """State of one run."""

    def __init__(self, job: DistilJob, progress: Progress) -> None:
        self._job, self._progress = job, progress
        self._directory = Path(job.student.path)
        if job.teacher is not None:
            _require_pair(self._directory, Path(job.teacher.path), job.trust_remote_code)
        _require_like_weights(job)
        self._text = self._read_text()
        self._recipe = self._described()

    def execute(self) -> Manifest:
        """Run what is not done yet."""
        job, settings = self._job, self._job.settings
        finished = finished_result(job.output, self._hash)
        if finished is not None:
            return finished
        started = time.monotonic()
        done = self._train_on_devices() if job.devices else self._train_here()
        student, workspace = done.student, done.workspace
        self._progress(settings.steps, settings.steps, "writing the checkpoint")
        student.model.eval()
        write_checkpoint(student, workspace)
        write_curve(workspace.directory, done.history)
        self._write_log(workspace, time.monotonic() - started, done.fused)
        sealed = seal(workspace.directory, self._manifest(student, done.held_out))
        workspace.publish()
        return sealed

    def _train_here(self) -> _Trained:
        job, settings = self._job, self._job.settings
        student, teacher = open_models(job)
        require_in_vocabulary(self._text, student.model.get_input_embeddings().weight.shape[0])
        objective = Objective(student.model, teacher, settings, job.device)
        workspace = Workspace(job.output, self._fingerprint(), job.resume)
        before = self._judged("before", workspace, student, objective)
        trainer = Trainer(student.trained(settings), objective, settings, workspace, job.device)
        student.model.train()
        trainer.run(self._text.trained, self._progress)
        after = self._judged("after", workspace, student, objective)
        held_out = {"before": before, "after": after}
        return _Trained(student, workspace, trainer.history, held_out, objective.fused)

    def _train_on_devices(self) -> _Trained:
        """Train in a process for each device; the student is put together here, on the CPU."""
        job = self._job
        workspace = Workspace(job.output, self._fingerprint(), job.resume)
        workspace.save_tensors(
            TEXT, {"trained": self._text.trained, "held_out": self._text.held_out}
        )
        known = {when: workspace.committed(f"judged-{when}") for when in ("before", "after")}
        judged = {when: value for when, value in known.items() if value is not None}
        given = (job, self._fingerprint(), judged)
        if job.device != "cpu":  # which earlier stages of this process filled
            torch.cuda.empty_cache()
        found = run_ranks(train_rank, job.devices, given, self._progress)
        student, _ = open_models(replace(job, teacher=None), held_on="cpu")
        state = workspace.tensors(STATE) or {}
        restore_masters(student.trained(job.settings), state, Alone())
        held_out = {when: found[when] for when in ("before", "after")}
        return _Trained(student, workspace, state["history"].tolist(), held_out, found["fused"])

    def _read_text(self) -> TrainingText:
        job, settings = self._job, self._job.settings
        return read_text(
            list(job.text),
            self._directory,
            job.cache,
            settings.sequence_length,
            settings.held_out,
            trusted=job.trust_remote_code,
        )

    def _judged(
        self, when: str, workspace: Workspace, student: Student, objective: Objective
    ) -> dict[str, float]:
        """The held-out loss, computed once and kept."""

        def judged() -> dict[str, float]:
            student.model.eval()
            batch = self._job.settings.micro_batch
            return judge(objective, self._text.held_out, batch, self._job.device)

        return dict(workspace.once(f"judged-{when}", judged))

    def _described(self) -> dict[str, Any]:
        """The recipe as run: what made the student, and one stage more."""
        job = self._job
        before = read_manifest(self._directory).recipe if is_checkpoint(self._directory) else {}
        settings = job.settings
        stage = {
            "method": "distil" if settings.kl or settings.hidden else "qat",
            **settings.model_dump(mode="json"),
            "teacher": None if job.teacher is None else job.teacher.digest,
            "student": job.student.digest,
            "text": self._text.hash,
            **({} if job.rounded is None else {"rounded": job.rounded.digest}),
        }
        name = str(before.get("name", job.student.name))
        stages = list(before.get("stages", []))
        return {**before, "name": f"{name}-{stage['method']}"[:62], "stages": [*stages, stage]}

    @property
    def _hash(self) -> str:
        return "sha256:" + sha256_json(self._recipe["stages"])

    def _fingerprint(self) -> dict[str, Any]:
        job = self._job
        stored = stored_dtype(self._directory)
        card = torch.cuda.get_device_name() if job.device != "cpu" else "cpu"
        return {
            "stages": self._recipe["stages"],
            "libraries": library_versions(),
            "device": card,
            "threads": torch.get_num_threads(),
            "dtype": str(compute_dtype(stored, job.device)),
            **({"devices": list(job.devices)} if job.devices else {}),
        }

    def _write_log(self, workspace: Workspace, seconds: float, fused: bool) -> None:
        """Facts of this run alone, kept out of the manifest so that equal runs are equal."""
        log = {
            "seconds": round(seconds, 3),
            "resumed": workspace.resumed,
            "logits": "never made" if fused else "made whole",
            "optimizer": self._job.settings.optimizer,
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json_atomically(workspace.directory / "compression_log.json", log)

    def _manifest(self, student: Student, held_out: dict[str, dict[str, float]]) -> Manifest:
        job, settings = self._job, self._job.settings
        golden = golden_of(
            student.model, student.directory, trust_remote_code=job.trust_remote_code
        )
        count, length = self._text.trained.shape
        recipe = {**self._recipe, "held_out": held_out, "trained_tokens": settings.tokens}
        training = {
            "description": self._text.description,
            "hash": self._text.hash,
            "sequences": count,
            "sequence_length": length,
        }
        if is_checkpoint(self._directory):
            old = read_manifest(self._directory)
            return replace(
                old,
                recipe=recipe,
                recipe_hash=self._hash,
                calibration=training,
                layers=[_trained(layer) for layer in old.layers],
                golden=golden,
                libraries=library_versions(),
                validation=None,
                files={},
                bytes=0,
            )
        model = job.teacher or job.student
        return Manifest(
            name=model.name,
            scheme="none",
            bits=8 * student.stored.itemsize,
            recipe=recipe,
            recipe_hash=self._hash,
            base_model={"name": model.name, "digest": model.digest, "source": model.source},
            calibration=training,
            layers=[],
            golden=golden,
            max_model_len=int(getattr(student.model.config, "max_position_embeddings", 0)) or 2048,
            libraries=library_versions(),
        )


def _trained(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer's report after training: its one-shot error is not its error any more."""
    kept = {key: value for key, value in layer.items() if key != "relative_error"}
    return {**kept, "method": f"{layer.get('method', '')}+trained"}


def _require_like_weights(job: DistilJob) -> None:
    """Refuse a start from weights that the student's codes were not chosen for.

    Raises:
        ModelError: stages that changed them before they were rounded.
    """
    directory = Path(job.student.path)
    if job.settings.start == "codes" or not is_checkpoint(directory):
        return
    stages = [str(stage.get("method")) for stage in read_manifest(directory).recipe["stages"]]
    if changed := [method for method in stages if method in _CHANGE_WEIGHTS]:
        raise ModelError(
            f"start: {job.settings.start!r} takes the teacher's weights, which {changed[0]!r} "
            "changed before they were rounded; use codes"
        )


def _require_pair(student: Path, teacher: Path, trusted: bool) -> None:
    """Check that student and teacher read text alike.

    Raises:
        ModelError: their tokenizers differ.
    """
    ours = load_tokenizer(student, trust_remote_code=trusted).get_vocab()
    theirs = load_tokenizer(teacher, trust_remote_code=trusted).get_vocab()
    if ours != theirs:
        raise ModelError(
            f"--teacher {teacher}: its tokenizer has another vocabulary than the student's; give "
            "the model that the student was made from"
        )


__all__ = ["CSV", "PNG", "DistilJob", "distil"]
