"""Tasks of lm-evaluation-harness (extra ``taut[eval]``), run with both models and paired by item.

The harness renders prompts and scores answers; its items, by document, are then compared like those
of any other task. Its own standard errors, which are of one model alone, are not used. A group of
tasks (``mmlu``) is one task whose parts are what is resampled.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from taut_deploy.validate.bounds import TaskBounds
from taut_deploy.validate.errors import CouldNotValidateError, one_line
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.outcome import RuleOutcome
from taut_deploy.validate.partial import Partial
from taut_deploy.validate.tasks.answers import ItemScore, TaskAnswers, Writer
from taut_deploy.validate.tasks.harness_given import FLAG
from taut_deploy.validate.tasks.items import Item
from taut_deploy.validate.tasks.judged import Judged, judge_task
from taut_deploy.validate.tasks.section import task_section

if TYPE_CHECKING:
    from taut_deploy.validate.tasks.run import Models

_BY_SUM = ("acc", "exact_match", "acc_norm", "em", "pass@1")
_BY_BYTE = ("acc_bytes", "acc_norm", *_BY_SUM)
_Z = 1.959964
# What the harness raises for names, data sets and templates that it cannot use.
_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, AttributeError)
_Samples = Mapping[str, list[dict[str, Any]]]


def run_harness(
    job: ValidationJob,
    tasks: Sequence[tuple[str, TaskBounds]],
    models: "Models",
    partial: Partial,
) -> dict[str, tuple[dict[str, Any], tuple[RuleOutcome, ...]]]:
    """Run tasks with both models.

    Args:
        job: the validation.
        tasks: names, with their limits.
        models: both, open.
        partial: is told of every task's answers.

    Returns:
        Task to its section of the report and the outcomes of its limits.

    Raises:
        CouldNotValidateError: an unknown task, data that is not there, or a model that cannot
            answer.
    """
    found = {}
    for name, bounds in tasks:
        baseline = _samples(job, name, bounds, models.baseline, models, partial)
        candidate = _samples(job, name, bounds, models.candidate, models, partial)
        answers = partial.task(TaskAnswers(name))
        _pair(answers, baseline, candidate, bounds)
        drawn = job.sampling
        metrics, rules = judge_task(answers, bounds, _Z, resamples=drawn.bootstrap, seed=drawn.seed)
        size = len(answers.items)
        judged = Judged(answers, metrics, rules, (size,), (size,), _Z)
        available = sum(len(_first_filter(samples)) for samples in baseline.values())
        section = task_section(judged, bounds, "harness", name, None, available)
        found[name] = section, rules
    return found


def _samples(
    job: ValidationJob,
    name: str,
    bounds: TaskBounds,
    source: Writer,
    models: "Models",
    partial: Partial,
) -> _Samples:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from taut_deploy.validate.tasks.harness_model import HarnessModel

    def once(at: int, ask: Callable[[], Any]) -> Any:
        return partial.once(f"harness {name} {source.role}", at, ask)

    def on_request(done: int, total: int) -> None:
        if job.progress is not None:
            job.progress(f"task {name} ({source.role})", done, total)

    path = None if job.items.harness_path is None else str(job.items.harness_path)
    try:
        results = simple_evaluate(
            HarnessModel(source, models.tokenizer, models.bos, on_request, once),
            tasks=[name],
            task_manager=TaskManager(include_path=path),
            limit=job.items.fewest(bounds.max_items),
            bootstrap_iters=0,
            log_samples=True,
        )
    except CouldNotValidateError:
        raise
    except _ERRORS as error:
        raise CouldNotValidateError(f"{FLAG} {name}: {one_line(error, 200)}") from error
    samples: _Samples = (results or {}).get("samples") or {}
    if not any(samples.values()):
        raise CouldNotValidateError(f"{FLAG} {name}: the harness returned no item")
    return samples


def _pair(
    answers: TaskAnswers, baseline: _Samples, candidate: _Samples, bounds: TaskBounds
) -> None:
    """Fill ``answers`` with the items both models answered, the same document each time."""
    several = len(baseline) > 1
    for part in sorted(baseline):
        ours = {_key(sample): sample for sample in _first_filter(candidate.get(part, []))}
        seen: set[tuple[Any, Any]] = set()
        for sample in _first_filter(baseline[part]):
            if (asked := _key(sample)[1:]) in seen:
                continue  # the set has the same document twice: it is one question
            seen.add(asked)
            other = ours.get(_key(sample))
            if other is None:
                raise CouldNotValidateError(
                    f"{FLAG} {part}: item {sample['doc_id']} was put to one model only; the task "
                    "draws its items anew"
                )
            metric = _metric(part, sample, bounds)
            prompt = str(sample["arguments"][0][0])
            group, identity = (part if several else None), f"{part}:{sample['doc_id']}"
            item = Item(prompt=prompt or " ", reference=" ", subtask=group, id=identity)
            answers.items.append(item)
            answers.baseline.append(_score(part, sample, metric))
            answers.candidate.append(_score(part, other, metric))


def _first_filter(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where a task reads answers in several ways, those of its first way."""
    return [sample for sample in samples if sample["filter"] == samples[0]["filter"]]


def _key(sample: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    return sample["doc_id"], sample["doc_hash"], sample["prompt_hash"]


def _metric(part: str, sample: Mapping[str, Any], bounds: TaskBounds) -> str:
    wanted = _BY_BYTE if bounds.score == "per_byte" else _BY_SUM
    for name in wanted:
        if name in sample["metrics"]:
            return name
    raise CouldNotValidateError(
        f"{FLAG} {part}: its items are not right or wrong (metrics: "
        f"{', '.join(sample['metrics'])}); choose a task with accuracy or exact match"
    )


def _score(part: str, sample: Mapping[str, Any], metric: str) -> ItemScore:
    value = float(sample[metric])
    if value not in (0.0, 1.0):
        raise CouldNotValidateError(
            f"{FLAG} {part}: {metric} of item {sample['doc_id']} is {value:g}, not 0 or 1"
        )
    return ItemScore(value == 1.0, None, str(sample["filtered_resps"])[:400])
