"""What was measured before a validation broke off: kept beside the place of its report, marked.

``partial.json`` is no report: ``complete`` is false, it has no verdict, and nothing reads it as
one. A run that measured nothing leaves nothing; one that ends writes a report and no such file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from taut_deploy.files import write_json_atomically
from taut_deploy.validate.divergence import Comparison
from taut_deploy.validate.errors import one_line
from taut_deploy.validate.journal import Journal
from taut_deploy.validate.output import PARTIAL_NAME, PARTIAL_SCHEMA

if TYPE_CHECKING:
    from taut_deploy.validate.tasks.answers import TaskAnswers

_T = TypeVar("_T")


class Partial:
    """Collects what is measured, and writes it where a run breaks off.

    Args:
        output: directory of the report.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._sequences: list[Comparison] = []
        self._tasks: list[TaskAnswers] = []
        self._slices: dict[str, int] = {}
        self._journal: Journal | None = None

    def begin(self, inputs: Mapping[str, str], resume: bool | None) -> Journal:
        """Go on with the answers of an earlier run of the same inputs, if there are any.

        Args:
            inputs: digests of what answers depend on, by name.
            resume: as :class:`Journal` takes it.

        Raises:
            CouldNotValidateError: nothing to go on with, and that was asked for.
        """
        self._journal = Journal(self._output, inputs, resume)
        return self._journal

    def once(self, stage: str, at: int, ask: Callable[[], _T]) -> _T:
        """An answer that an earlier run had, or that ``ask`` gives; it is kept.

        Args:
            stage: what is being done.
            at: place of the answer in it.
            ask: gives it.
        """
        return ask() if self._journal is None else self._journal.once(stage, at, ask)

    def known_sequence(self, at: int) -> Comparison | None:
        """What an earlier run compared of the text at a place; None where it came not so far."""
        known: Comparison | None = None
        if self._journal is not None:
            known = self._journal.known("compare", at)
        return known

    def sequence(self, comparison: Comparison) -> None:
        """Keep one sequence of the text."""
        self._sequences.append(comparison)

    def task(self, answers: TaskAnswers) -> TaskAnswers:
        """Keep a task whose answers are about to come."""
        self._tasks.append(answers)
        return answers

    def prompts(self, name: str, done: int) -> None:
        """Note how many prompts of a slice were answered."""
        self._slices[name] = done

    def write(self, error: BaseException) -> Path | None:
        """Write what there is.

        Args:
            error: that ended the run.

        Returns:
            The file; None where nothing had been measured.

        Raises:
            OutputError: the directory cannot be written.
        """
        tasks = [answers for answers in self._tasks if answers.items]
        if not (self._sequences or tasks or self._slices):
            return None
        self._output.mkdir(parents=True, exist_ok=True)
        file = self._output / PARTIAL_NAME
        content = {
            "schema": PARTIAL_SCHEMA,
            "schema_version": 1,
            "complete": False,
            "error": one_line(error),
            "text": [_sequence(comparison) for comparison in self._sequences],
            "tasks": {answers.name: _answers(answers) for answers in tasks},
            "slices": self._slices,
        }
        write_json_atomically(file, content)
        return file


def _sequence(comparison: Comparison) -> dict[str, float]:
    same = comparison.baseline_top1 == comparison.candidate_top1
    return {
        "baseline_nll": float(comparison.baseline_nll.mean()),
        "candidate_nll": float(comparison.candidate_nll.mean()),
        "mean_kl": float(comparison.kl.mean()),
        "top1_agreement": float(same.mean()),
    }


def _answers(answers: TaskAnswers) -> list[dict[str, Any]]:
    rows = zip(answers.items, answers.baseline, answers.candidate, strict=True)
    return [
        {
            "id": item.id,
            "prompt": item.prompt[-80:],
            "baseline": {"right": first.right, "said": first.said[:80]},
            "candidate": {"right": second.right, "said": second.said[:80]},
        }
        for item, first, second in rows
    ]
