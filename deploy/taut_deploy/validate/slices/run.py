"""The slices of a validation: measured, judged, described."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from taut_deploy.validate.errors import NotOfferedError
from taut_deploy.validate.gate import judge_bounds, unmeasured_bounds
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.outcome import RuleOutcome
from taut_deploy.validate.partial import Partial
from taut_deploy.validate.slices.measured import Measured
from taut_deploy.validate.slices.measures import MEASURES, Setting, Speaker
from taut_deploy.validate.slices.plan import SlicePlan
from taut_deploy.validate.text import Tokenizer

PART = "slices"
_MORE = "give the slice more prompts (file:)"


@dataclass(frozen=True, slots=True)
class Speakers:
    """Both models, open, with their tokenizer and the text of the validation."""

    baseline: Speaker
    candidate: Speaker
    tokenizer: Tokenizer
    bos: int | None
    text_ids: tuple[int, ...]


def compare_slices(
    job: ValidationJob, plan: Sequence[SlicePlan], models: Speakers, partial: Partial
) -> tuple[dict[str, Any], tuple[RuleOutcome, ...]]:
    """Measure and judge every slice.

    Args:
        job: the validation.
        plan: its slices.
        models: both.
        partial: is told of every prompt.

    Returns:
        The report's section and the outcomes of the limits.

    Raises:
        CouldNotValidateError: a model cannot answer.
    """
    sections: dict[str, Any] = {}
    rules: tuple[RuleOutcome, ...] = ()
    for one in plan:
        setting = Setting(
            models.baseline,
            models.candidate,
            models.tokenizer,
            models.bos,
            models.text_ids,
            job.sampling.bootstrap,
            job.sampling.seed,
            _each(job, one.name, partial),
        )
        try:
            measured = MEASURES[one.name](setting, one.prompts.items, one.bounds)
        except NotOfferedError as error:
            sections[one.name] = _described(one, None, str(error))
            rules += unmeasured_bounds(PART, one.name, one.bounds, str(error))
            continue
        sections[one.name] = _described(one, measured, None)
        rules += judge_bounds(
            PART,
            one.name,
            one.bounds,
            measured.metrics,
            more=_MORE,
            why_not=measured.not_measured,
            accept_lower_bound=job.accept_lower_bound,
        )
    return sections, rules


def _each(
    job: ValidationJob, name: str, partial: Partial
) -> Callable[[Sequence[Any], Callable[[Any], Any]], list[Any]]:
    def each(items: Sequence[Any], ask: Callable[[Any], Any]) -> list[Any]:
        found = []
        for done, item in enumerate(items, start=1):
            found.append(partial.once(f"slice {name}", done, functools.partial(ask, item)))
            partial.prompts(name, done)
            if job.progress is not None:
                job.progress(f"slice {name}", done, len(items))
        return found

    return each


def _described(plan: SlicePlan, measured: Measured | None, why_not: str | None) -> dict[str, Any]:
    head = {
        "source": plan.prompts.source,
        "sha256": plan.prompts.sha256,
        "measured": measured is not None,
        "why_not": why_not,
    }
    if measured is None:
        return {**head, "items": 0, "metrics": {}, "values": {}, "parts": {}, "not_measured": {}}
    return {
        **head,
        "items": measured.items,
        "metrics": {name: dataclasses.asdict(value) for name, value in measured.metrics.items()},
        "values": {name: dict(value) for name, value in measured.values.items()},
        "parts": dict(measured.parts),
        "not_measured": dict(measured.not_measured),
    }
