"""What a policy would need, before anything is run: work, items, and what they can show."""

import json
import time
from typing import Any, Protocol

from taut_deploy.validate.bounds import Bounds, TaskBounds
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.paired.shares import items_needed
from taut_deploy.validate.paired.spending import boundaries, looks
from taut_deploy.validate.policy import load_policy
from taut_deploy.validate.slices.plan import plan_slices
from taut_deploy.validate.tasks.items import TaskFile
from taut_deploy.validate.tasks.judged import FIRST_LOOK
from taut_deploy.validate.tasks.plan import plan_tasks

_BYTES_PER_TOKEN = 4  # of English in today's vocabularies; only the work is estimated with it
_FLIPS = (0.03, 0.05, 0.10)
_ACCURACY = 0.5
_PROBE_TOKENS = 64


class _Timed(Protocol):
    def score(self, ids: tuple[int, ...]) -> object:
        """Distributions for ``len(ids) - 1`` positions."""


def explain(job: ValidationJob) -> dict[str, Any]:
    """Describe what a validation would do.

    Args:
        job: only policy, tasks, slices and sampling are read.

    Returns:
        Plain data: ``accuracy``, ``tasks``, ``slices`` and ``latency`` with their limits, and
        ``tokens_per_model``, an estimate of the tokens each model is to compute.

    Raises:
        CouldNotValidateError: the policy, a task file or prompts cannot be used.
    """
    policy = load_policy(job.policy)
    tasks, slices = plan_tasks(job, policy), plan_slices(job, policy)
    most = job.sampling.most
    tokens = most * job.sampling.sequence_length
    found: dict[str, Any] = {
        "policy": policy.name,
        "accuracy": {
            "limits": _limits_of(policy.require.limits),
            "sequences": list(looks(job.sampling.sequences, most)),
            "tokens": tokens,
        },
        "tasks": {},
        "slices": {},
        "latency": None,
    }
    for task, bounds in tasks.files:
        found["tasks"][task.name] = one = _task(job, task, bounds)
        tokens += one["tokens"]
    for name, bounds in (*tasks.harness, *tasks.missing):
        in_harness = name in job.items.harness
        kind = "lm-evaluation-harness" if in_harness else "no source: --task or --lm-eval"
        found["tasks"][name] = {"kind": kind, "limits": _limits(bounds), **_power(bounds)}
    for plan in slices:
        size = sum(len(item.model_dump_json()) for item in plan.prompts.items) // _BYTES_PER_TOKEN
        answers = sum(getattr(item, "max_tokens", 0) for item in plan.prompts.items)
        window = getattr(plan.bounds, "tokens", 0) * (len(plan.prompts.items) + 4)
        found["slices"][plan.name] = {
            "prompts": len(plan.prompts.items),
            "limits": _limits(plan.bounds),
            "tokens": size + answers + window,
        }
        tokens += size + answers + window
    if policy.latency is not None:
        bounded = [f"{name} {side} {value:g}" for name, side, value in policy.latency.limits]
        found["latency"] = {"limits": bounded, "requests": job.latency_plan.requests}
    return found | {"tokens_per_model": tokens}


def tokens_per_second(source: _Timed) -> float:
    """Measure how fast a model scores one short sequence; the first, slower one is not counted.

    Args:
        source: the model.
    """
    ids = (1, 2) * (_PROBE_TOKENS // 2)
    source.score(ids)
    started = time.perf_counter()
    source.score(ids)
    return _PROBE_TOKENS / (time.perf_counter() - started)


def _task(job: ValidationJob, task: TaskFile, bounds: TaskBounds) -> dict[str, Any]:
    most = min(job.items.fewest(bounds.max_items), len(task.items))
    sizes = looks(FIRST_LOOK, most) if bounds.limits else (most,)
    rows = (json.dumps(item.prompt, allow_nan=False) for item in task.items[:most])
    times = len(task.items[0].choices or ()) or 1
    written = sum(item.max_tokens for item in task.items[:most] if item.choices is None)
    return {
        "kind": task.kind,
        "items": len(task.items),
        "looks": list(sizes),
        "z": [round(z, 3) for z in boundaries(sizes)],
        "limits": _limits(bounds),
        "tokens": times * sum(map(len, rows)) // _BYTES_PER_TOKEN + written,
        **_power(bounds),
    }


def _power(bounds: TaskBounds) -> dict[str, Any]:
    """Items that show an equally good candidate within the limits in 80 % of runs, by flips."""
    margin = bounds.margin(_ACCURACY)
    if margin is None:
        return {}
    needed = {f"{flips:.0%} flips": items_needed(flips, margin) for flips in _FLIPS}
    return {"items_for_80_percent_power": needed, "at_baseline_accuracy": _ACCURACY}


def _limits(bounds: Bounds) -> list[str]:
    return _limits_of(bounds.limits)


def _limits_of(limits: dict[str, Any]) -> list[str]:
    return [
        f"{name} {side} {value:g}" for name, limit in limits.items() for side, value in limit.sides
    ]
