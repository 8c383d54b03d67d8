"""Which tasks a validation runs: those of the policy and those of the command line."""

from dataclasses import dataclass

from taut_deploy.validate.bounds import ANY, TaskBounds
from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.policy import Policy, beside_policy
from taut_deploy.validate.tasks.harness import check_harness_path, require_harness
from taut_deploy.validate.tasks.items import TaskFile, read_task


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """What is asked.

    Args:
        files: tasks of files, with their limits.
        harness: tasks of lm-evaluation-harness, with theirs.
        missing: tasks that the policy bounds and nothing names a source of.
    """

    files: tuple[tuple[TaskFile, TaskBounds], ...]
    harness: tuple[tuple[str, TaskBounds], ...]
    missing: tuple[tuple[str, TaskBounds], ...]


def plan_tasks(job: ValidationJob, policy: Policy) -> TaskPlan:
    """Read every task file before a model is loaded.

    Raises:
        CouldNotValidateError: a file that cannot be used, a name given twice, or ``any`` with a
            file.
    """
    check_harness_path(job.harness_path)
    if job.harness:
        require_harness()
    sections = dict(policy.tasks)
    fallback = sections.pop(ANY, None) or TaskBounds()
    if fallback.file is not None:
        raise CouldNotValidateError(
            f"{job.policy}: tasks.{ANY}.file: '{ANY}' bounds the tasks of the command line; "
            "name the task to give it a file"
        )
    files = [
        (
            read_task(
                beside_policy(job.policy, bounds.file), f"{job.policy}: tasks.{name}.file", name
            ),
            bounds,
        )
        for name, bounds in sections.items()
        if bounds.file is not None
    ]
    for path in job.tasks:
        task = read_task(path, "--task")
        files.append((task, sections.get(task.name, fallback)))
    harness = [(name, sections.get(name, fallback)) for name in job.harness]
    names = [task.name for task, _ in files] + [name for name, _ in harness]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CouldNotValidateError(f"--task: two tasks are named {twice[0]}; rename a file")
    missing = [(name, bounds) for name, bounds in sections.items() if name not in names]
    return TaskPlan(tuple(files), tuple(harness), tuple(missing))
