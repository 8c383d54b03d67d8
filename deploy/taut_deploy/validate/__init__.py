"""``taut validate``: what a compressed model costs against its baseline, and a verdict on it.

The public surface is :class:`ValidationJob`, :func:`run_validation`, :class:`ValidationResult`,
:class:`Verdict` and :class:`CouldNotValidateError`. Importing this package loads neither torch nor
transformers.
"""

from taut_deploy.progress import Say
from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.job import Progress, ValidationJob
from taut_deploy.validate.outcome import Metric, RuleOutcome, ValidationResult, Verdict
from taut_deploy.validate.settings import Access, Directories, Items, Sampling, Servers

__all__ = [
    "Access",
    "CouldNotValidateError",
    "Directories",
    "Items",
    "Metric",
    "Progress",
    "RuleOutcome",
    "Sampling",
    "Servers",
    "ValidationJob",
    "ValidationResult",
    "Verdict",
    "run_validation",
]


def run_validation(job: ValidationJob, say: Say = lambda _: None) -> ValidationResult:
    """Compare two models and write the report.

    Args:
        job: what to compare, on which text and against which policy.
        say: told, before anything is loaded, of each task that leaves the verdict undecided.

    Returns:
        The verdict; ``report.json`` and ``report.md`` lie in ``job.output``.

    Raises:
        CouldNotValidateError: the comparison could not be made (exit code 3); nothing was written.
        OutputError: the report could not be written.
    """
    # Here, so that `taut --help` does not load them; the plan first, as torch takes seconds.
    from taut_deploy.validate.plan import read_plan
    from taut_deploy.validate.tasks.plan import NO_SOURCE

    plan = read_plan(job)
    for name in plan.tasks.undecidable:
        say(f"{job.policy}: tasks.{name}: nothing supplies it, so no verdict is PASS; {NO_SOURCE}")
    from taut_deploy.validate.run import run

    return run(job, plan)
