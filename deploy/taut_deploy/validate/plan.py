"""What a job asks for, read before anything is loaded.

No tensor library is imported, which takes seconds: a mistyped key, a missing file or an empty task
is told of at once.
"""

from dataclasses import dataclass
from pathlib import Path

from taut_deploy.validate.configuration import read_config
from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.output import check_output
from taut_deploy.validate.policy import Policy, load_policy
from taut_deploy.validate.server_connection import is_url
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
    """Read policy, tasks, slices and text; look at the directories that are named.

    Raises:
        CouldNotValidateError: one cannot be used; names the flag, the file and the key or line.
    """
    check_output(job.output)
    policy = load_policy(job.policy)
    plan = Plan(policy, plan_tasks(job, policy), plan_slices(job, policy))
    read_text(job.text)
    for role in ("baseline", "candidate"):
        if not is_url(getattr(job, role)):
            read_config(Path(getattr(job, role)), role)
    _check_latency(job)
    return plan


def _check_latency(job: ValidationJob) -> None:
    """Refuse what was asked for and cannot be measured.

    Raises:
        CouldNotValidateError: ``--latency`` or headers for a directory.
    """
    for role in ("baseline", "candidate"):
        reference = getattr(job, role)
        if is_url(reference):
            continue
        if job.latency:
            raise CouldNotValidateError(
                f"--latency: {role} {reference} is a directory; latency takes two servers"
            )
        if getattr(job.access, f"{role}_headers"):
            raise CouldNotValidateError(
                f"--{role}-header: {reference} is a directory; headers are for servers"
            )
