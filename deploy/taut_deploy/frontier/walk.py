"""The search: candidates one after another, the smallest first, until one passes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from taut_deploy.bench.distil_texts import require_apart
from taut_deploy.checkpoint import Manifest, is_checkpoint
from taut_deploy.compress import pipeline
from taut_deploy.compress.workspace import sole_writer
from taut_deploy.errors import CheckpointError, ModelError, RecipeError
from taut_deploy.files import disk_errors_named, require_free_space
from taut_deploy.frontier import judging
from taut_deploy.frontier.candidates import Candidate, Ladder, Skipped, lay_out
from taut_deploy.frontier.checkpoints import Checkpoints
from taut_deploy.frontier.ledger import LEDGER, Key, Ledger, Try
from taut_deploy.frontier.request import ShrinkRequest
from taut_deploy.frontier.shared import Shared
from taut_deploy.models.directory import weight_files
from taut_deploy.progress import Report
from taut_deploy.validate import CouldNotValidateError, run_validation
from taut_deploy.validate.record import record

Status = Literal["found", "none", "budget"]
# Errors of one candidate alone: it is refused, and the next one is tried.
_OF_A_CANDIDATE = (RecipeError, ModelError, CheckpointError, CouldNotValidateError)


@dataclass(frozen=True)
class Frontier:
    """How far the search came.

    Args:
        status: a candidate passed, none of them does, or the time was used up.
        tries: in the order of size; the last one passed where ``status`` is ``found``.
        untried: candidates that were not reached.
        skipped: what is not worth trying, and why.
        checkpoint: directory of the one that passed.
    """

    status: Status
    tries: tuple[Try, ...]
    untried: tuple[Candidate, ...]
    skipped: tuple[Skipped, ...]
    checkpoint: Path | None

    @property
    def nearest_miss(self) -> judging.Miss | None:
        """Of the tries that did not pass the one that missed its worst bound by least."""
        misses = [miss for one in self.tries if (miss := judging.miss_of(one)) is not None]
        return min(misses, key=lambda miss: miss.excess, default=None)


def search(
    request: ShrinkRequest,
    left_out: tuple[Skipped, ...],
    progress: Report,
    say: Callable[[str], None],
) -> Frontier:
    """Find the smallest candidate that passes; what an earlier run did is not repeated.

    Args:
        request: what is asked for.
        left_out: recipes that are tried only where they are named.
        progress: told steps done, steps in all, and what is being done.
        say: told what was found, in lines.

    Raises:
        ModelError: the model cannot be compressed.
        RecipeError: no candidate is within the limit, or one is calibrated on the judged text.
        CouldNotValidateError: text, device or policy would stop every validation.
        OutputError: the disk is full, or the ledger is not this model's.
    """
    started = time.monotonic()
    with sole_writer(request.output, "taut shrink"):
        # Before a model is opened: it may be that of other tries.
        with disk_errors_named(request.output):
            request.tries.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(request.output / LEDGER, request.model)
        text = judging.require_judgeable(request)
        ladder = lay_out(request)
        walk = _Walk(request, ledger, np.asarray(text.sequences).reshape(-1), progress, say)
        return walk.run(ladder, left_out, started)


class _BudgetSpentError(Exception):
    """The time is used up; what was committed is found by the next run."""


class _Walk:
    """State of one search."""

    def __init__(
        self,
        request: ShrinkRequest,
        ledger: Ledger,
        judged: np.ndarray,
        progress: Report,
        say: Callable[[str], None],
    ) -> None:
        self._request, self._ledger, self._judged = request, ledger, judged
        self._progress, self._say = progress, say
        self._shared = Shared(request.output / "shared")
        self._checkpoints = Checkpoints(request.tries)
        self._deadline: float | None = None

    def run(self, ladder: Ladder, left_out: tuple[Skipped, ...], started: float) -> Frontier:
        """Go up the ladder."""
        if self._request.budget_s is not None:
            self._deadline = started + self._request.budget_s
        for one in (*left_out, *ladder.skipped):
            self._say(f"skipped {one.name}: {one.reason}")
        tries: list[Try] = []
        status: Status = "none"
        checkpoint = None
        for candidate in ladder.candidates:
            try:
                found = self._settled(candidate)
            except _BudgetSpentError:
                status = "budget"
                break
            tries.append(found)
            self._say(_told(found))
            if found.outcome == "PASS":
                status, checkpoint = "found", self._request.tries / candidate.place
                break
            if not self._request.keep_all:
                self._checkpoints.remove(candidate.place)
        return Frontier(
            status,
            tuple(tries),
            ladder.candidates[len(tries) :],
            (*left_out, *ladder.skipped),
            checkpoint,
        )

    def _settled(self, candidate: Candidate) -> Try:
        """The candidate's try: of the ledger, judged anew from its figures, or made now."""
        key = judging.key_of(self._request, candidate)
        found = self._ledger.judged(key)
        if found is None and (measured := self._ledger.measured(key)) is not None:
            found = self._rejudged(measured, key)
        if found is None:
            return self._made(candidate, key)
        if found.outcome == "PASS" and not self._checkpoints.holds(candidate.place, found):
            manifest, seconds = self._compressed(candidate)
            if manifest.digest != found.checkpoint_digest:
                return self._compared(candidate, key, manifest, seconds)
        if found.outcome == "PASS":
            self._checkpoints.record(candidate.place, found)
        return found

    def _rejudged(self, measured: Try, key: Key) -> Try | None:
        request = self._request
        judged = judging.rejudged(measured, request.policy, request.validation)
        if judged is None:
            return None
        verdict, rules = judged
        said = judging.recorded_anew(measured, verdict, request)
        entry = measured.model_copy(
            update={
                "key": key,
                "outcome": verdict.value,
                "rules": rules,
                "policy": request.policy.model_dump(mode="json"),
                "rejudged": True,
                "recorded": said,
                "finished_at": _now(),
            }
        )
        self._ledger.append(entry)
        return entry

    def _made(self, candidate: Candidate, key: Key) -> Try:
        self._require_time()
        try:
            manifest, seconds = self._compressed(candidate)
            return self._compared(candidate, key, manifest, seconds)
        except _OF_A_CANDIDATE as error:
            if judging.concerns_all(error):
                raise
            entry = self._entry(candidate, key, outcome="REFUSED", reason=str(error))
            self._ledger.append(entry)
            return entry

    def _compressed(self, candidate: Candidate) -> tuple[Manifest, float]:
        """Make the candidate's checkpoint, and say how many seconds that took."""
        request = self._request
        job = request.job(candidate.recipe, candidate.place)
        if is_checkpoint(job.output):  # of a run that was killed before it was judged
            return pipeline.compress(job), self._checkpoints.seconds(candidate.place)
        require_free_space(request.tries, candidate.disk_bytes)
        started = time.monotonic()
        told = self._within_budget(candidate)
        self._require_apart(candidate, self._shared.tokens(job, told))
        self._shared.hand_over(job, told)
        manifest = pipeline.compress(job, told)
        return manifest, time.monotonic() - started

    def _require_apart(self, candidate: Candidate, tokens: torch.Tensor) -> None:
        try:
            require_apart(candidate.name, tokens.reshape(-1).numpy(), self._judged)
        except RecipeError as error:
            raise CouldNotValidateError(
                f"--text {self._request.validation.text}: recipe {candidate.name} is calibrated on "
                "a passage of it; judge on another text"
            ) from error

    def _compared(
        self, candidate: Candidate, key: Key, manifest: Manifest, compress_seconds: float
    ) -> Try:
        request = self._request
        place = request.tries / candidate.place
        size = sum(path.stat().st_size for path in weight_files(place))
        limit = request.limit
        made = {
            "bytes": size,
            "checkpoint_digest": manifest.digest,
            "compress_seconds": compress_seconds,
        }
        if limit is not None and limit.of == "weights" and size > limit.bytes:
            reason = f"its weight files have {size} bytes, more than {limit.flag} allows"
            entry = self._entry(candidate, key, outcome="REFUSED", reason=reason, **made)
            self._ledger.append(entry)
            return entry
        started = time.monotonic()
        told = self._within_budget(candidate)
        job = request.comparison(
            candidate.place, lambda stage, done, total: told(done, total, stage)
        )
        result = run_validation(job)
        record(job, result, None)
        entry = self._entry(
            candidate,
            key,
            outcome=result.verdict.value,
            metrics=result.report["metrics"],
            rules=[judging.plain_rule(rule) for rule in result.rules],
            beyond=judging.beyond_text(request.policy, job),
            sequences=result.report["text"]["sequences"],
            recorded=self._checkpoints.verdict(candidate.place),
            validate_seconds=time.monotonic() - started,
            **made,
        )
        self._ledger.append(entry)
        return entry

    def _entry(self, candidate: Candidate, key: Key, **found: object) -> Try:
        times = {"compress_seconds": 0.0, "validate_seconds": 0.0}
        return Try.model_validate(
            {
                "key": key,
                "name": candidate.name,
                "recipe": candidate.recipe.as_json(),
                "predicted_bytes": candidate.weights_bytes,
                "sequences": self._request.validation.sampling.sequences,
                "policy": self._request.policy.model_dump(mode="json"),
                "versions": judging.versions(self._request.validation.directories.served),
                "finished_at": _now(),
                **times,
                **found,
            }
        )

    def _require_time(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise _BudgetSpentError

    def _within_budget(self, candidate: Candidate) -> Report:
        """Progress of a try; ends it where the time is used up, which is safe at every step."""

        def told(done: int, total: int, what: str) -> None:
            self._require_time()
            self._progress(done, total, f"{candidate.name}: {what}")

        return told


def _told(entry: Try) -> str:
    if entry.outcome == "REFUSED":
        return f"{entry.name}: refused: {entry.reason}"
    kl = entry.metrics["mean_kl"]
    again = ", judged anew from its figures" if entry.rejudged else ""
    return (
        f"{entry.name}: {entry.outcome}, {(entry.bytes or 0) / 1e6:.1f} MB, "
        f"KL {kl['estimate']:.4g} [{kl['low']:.4g}, {kl['high']:.4g}]{again}"
    )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
