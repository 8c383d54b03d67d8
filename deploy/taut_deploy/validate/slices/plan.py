"""Which slices a validation measures: those of the policy and those of the command line."""

from dataclasses import dataclass
from pathlib import Path

from taut_deploy.validate.bounds import SLICE_NAMES, SliceBounds, Slices
from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.policy import Policy, beside_policy
from taut_deploy.validate.slices.prompts import Prompts, read_prompts


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """A slice that is to be measured."""

    name: str
    prompts: Prompts
    bounds: SliceBounds


def plan_slices(job: ValidationJob, policy: Policy) -> tuple[SlicePlan, ...]:
    """Read the prompts of every slice before a model is loaded.

    Raises:
        CouldNotValidateError: an unknown slice, or a file that cannot be used.
    """
    asked = dict(policy.slices.named)
    given: dict[str, Path] = {}
    for word in job.items.slices:
        name, separator, file = word.partition("=")
        if name not in SLICE_NAMES or (separator and not file):
            raise CouldNotValidateError(
                f"--slice {word}: give one of {', '.join(SLICE_NAMES)}, or NAME=FILE"
            )
        asked.setdefault(name, _without_limits(name))
        if file:
            given[name] = Path(file)
    found = []
    for name, bounds in asked.items():
        path, flag = given.get(name), "--slice"
        if path is None and bounds.file is not None:
            path, flag = beside_policy(job.policy, bounds.file), f"{job.policy}: slices.{name}.file"
        found.append(SlicePlan(name, read_prompts(name, path, flag), bounds))
    return tuple(found)


def _without_limits(name: str) -> SliceBounds:
    bounds: SliceBounds = Slices.model_validate({name: {}}).named[name]
    return bounds
