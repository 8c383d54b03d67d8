"""The tasks of a validation: ask, judge, describe."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from taut_deploy.validate.bounds import TaskBounds
from taut_deploy.validate.gate import unmeasured_bounds
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.outcome import RuleOutcome
from taut_deploy.validate.paired.holm import holm_adjusted
from taut_deploy.validate.partial import Partial
from taut_deploy.validate.tasks.answers import ItemScore, TaskAnswers, Writer, answer_item
from taut_deploy.validate.tasks.items import Item, TaskFile
from taut_deploy.validate.tasks.judged import PART, ask_until_decided, shuffled
from taut_deploy.validate.tasks.plan import NO_SOURCE, TaskPlan
from taut_deploy.validate.tasks.section import INTERVAL, task_section
from taut_deploy.validate.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Models:
    """Both models, open, and what they share.

    Args:
        baseline: the model compared with.
        candidate: the model compared.
        tokenizer: the baseline's; the candidate's is the same.
        bos: token in front of every text, if the tokenizer has one.
    """

    baseline: Writer
    candidate: Writer
    tokenizer: Tokenizer
    bos: int | None


def compare_tasks(
    job: ValidationJob, plan: TaskPlan, models: Models, partial: Partial
) -> tuple[dict[str, Any], tuple[RuleOutcome, ...]]:
    """Run every task.

    Args:
        job: the validation.
        plan: its tasks.
        models: both, open.
        partial: is told of every answer.

    Returns:
        The report's section and the outcomes of the limits.

    Raises:
        CouldNotValidateError: a model cannot answer, or the harness is missing or fails.
    """
    sections: dict[str, dict[str, Any]] = {}
    rules: tuple[RuleOutcome, ...] = ()
    for task, bounds in plan.files:
        sections[task.name], judged = _run_file(job, task, bounds, models, partial)
        rules += judged
    if plan.harness:
        from taut_deploy.validate.tasks.harness import run_harness  # an extra that few install

        for name, (section, judged) in run_harness(job, plan.harness, models, partial).items():
            sections[name] = section
            rules += judged
    for name, bounds in plan.missing:
        rules += unmeasured_bounds(PART, name, bounds, NO_SOURCE)
    adjusted = holm_adjusted({name: one["mcnemar_p"] for name, one in sections.items()})
    for name, value in adjusted.items():
        sections[name]["mcnemar_p_holm"] = value
    return _section(sections), rules


def _section(tasks: Mapping[str, Any]) -> dict[str, Any]:
    recoveries = [
        one["metrics"]["recovery"]["estimate"]
        for one in tasks.values()
        if "recovery" in one["metrics"]
    ]
    macro = sum(recoveries) / len(recoveries) if recoveries else None
    return {"interval": INTERVAL, "macro_recovery": macro, "tasks": dict(tasks)}


def _run_file(
    job: ValidationJob, task: TaskFile, bounds: TaskBounds, models: Models, partial: Partial
) -> tuple[dict[str, Any], tuple[RuleOutcome, ...]]:
    most = min(job.items.fewest(bounds.max_items), len(task.items))
    answers = partial.task(TaskAnswers(task.name))

    def both(item: Item) -> tuple[ItemScore, ItemScore]:
        return (
            answer_item(models.baseline, models.tokenizer, models.bos, item),
            answer_item(models.candidate, models.tokenizer, models.bos, item),
        )

    def ask(item: Item) -> tuple[ItemScore, ItemScore]:
        return partial.once(f"task {task.name}", len(answers.items), lambda: both(item))

    def on_item(done: int, total: int) -> None:
        if job.progress is not None:
            job.progress(f"task {task.name}", done, total)

    judged = ask_until_decided(
        answers,
        shuffled(task.items, most, job.sampling.seed),
        bounds,
        ask,
        resamples=job.sampling.bootstrap,
        seed=job.sampling.seed,
        on_item=on_item,
    )
    section = task_section(judged, bounds, task.kind, str(task.path), task.sha256, len(task.items))
    return section, judged.rules
