"""Which tasks a validation runs: those of the policy and those of the command line."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from taut_deploy.errors import ModelError
from taut_deploy.validate.bounds import ANY, TaskBounds
from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.policy import Policy, beside_policy
from taut_deploy.validate.tasks.harness_given import check_harness_path, require_harness
from taut_deploy.validate.tasks.items import TaskFile, read_task
from taut_deploy.validate.tasks.packaged import PACKAGED, packaged_task, require_packaged

NO_SOURCE = "give its file in the policy, with --task, or its name with --lm-eval"
"""What to do about a task that a policy bounds and nothing supplies."""


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

    @property
    def undecidable(self) -> tuple[str, ...]:
        """Missing tasks without which no verdict can be PASS."""
        return tuple(name for name, bounds in self.missing if bounds.required and bounds.limits)


def plan_tasks(job: ValidationJob, policy: Policy) -> TaskPlan:
    """Read every task file before a model is loaded.

    Raises:
        CouldNotValidateError: a file that cannot be used, a name given twice, or ``any`` with a
            file.
    """
    check_harness_path(job.items.harness_path)
    if job.items.harness:
        require_harness()
    sections = dict(policy.tasks)
    fallback = sections.pop(ANY, None) or TaskBounds()
    if fallback.file is not None or fallback.packaged:
        said = "packaged" if fallback.file is None else "file"
        raise CouldNotValidateError(
            f"{job.policy}: tasks.{ANY}.{said}: '{ANY}' bounds the tasks of the command line; "
            "name the task to give it a file"
        )
    files = list(_of_policy(job, sections))
    for path in job.items.tasks:
        task = read_task(_here(path), "--task")
        files.append((task, sections.get(task.name, fallback)))
    harness = [(name, sections.get(name, fallback)) for name in job.items.harness]
    names = [task.name for task, _ in files] + [name for name, _ in harness]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CouldNotValidateError(f"--task: two tasks are named {twice[0]}; rename a file")
    missing = [(name, bounds) for name, bounds in sections.items() if name not in names]
    return TaskPlan(tuple(files), tuple(harness), tuple(missing))


def _of_policy(
    job: ValidationJob, sections: Mapping[str, TaskBounds]
) -> Iterator[tuple[TaskFile, TaskBounds]]:
    for name, bounds in sections.items():
        where = f"{job.policy}: tasks.{name}"
        if bounds.packaged:
            if bounds.file is not None:
                raise CouldNotValidateError(f"{where}: 'file' or 'packaged', not both")
            yield read_task(_fetched(name, f"{where}.packaged: "), where, name), bounds
        elif bounds.file is not None:
            path = beside_policy(job.policy, bounds.file)
            yield read_task(path, f"{where}.file", name), bounds


def _here(path: Path) -> Path:
    """A file, or a packaged task where there is no such file."""
    if path.name in PACKAGED and path == Path(path.name) and not path.exists():
        return _fetched(path.name, "--task ")
    return path


def _fetched(name: str, where: str) -> Path:
    try:
        require_packaged(name, where)
        return packaged_task(name)
    except ModelError as error:
        raise CouldNotValidateError(str(error)) from error
