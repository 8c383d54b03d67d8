"""What a job asks for, read before anything is loaded.

No tensor library is imported, which takes seconds: a mistyped key, a missing file or an empty task
is told of at once.
"""

from dataclasses import dataclass

from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.policy import Policy, load_policy
from taut_deploy.validate.slices.plan import SlicePlan, plan_slices
from taut_deploy.validate.tasks.plan import TaskPlan, plan_tasks
from taut_deploy.validate.text import read_text


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy, and the items and prompts that it and the job name."""

    policy: Policy
    tasks: TaskPlan
    slices: tuple[SlicePlan, ...]

    @property
    def digests(self) -> list[str]:
        """Of the files that items and prompts come from."""
        files = [task.sha256 for task, _ in self.tasks.files]
        return [*files, *(one.prompts.sha256 for one in self.slices)]


def read_plan(job: ValidationJob) -> Plan:
    """Read policy, tasks, slices and text.

    Raises:
        CouldNotValidateError: one cannot be used; names the flag, the file and the key or line.
    """
    policy = load_policy(job.policy)
    plan = Plan(policy, plan_tasks(job, policy), plan_slices(job, policy))
    read_text(job.text)
    return plan
