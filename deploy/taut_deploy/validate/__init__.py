"""``taut validate``: what a compressed model costs against its baseline, and a verdict on it.

The public surface is :class:`ValidationJob`, :func:`run_validation`, :class:`ValidationResult`,
:class:`Verdict` and :class:`CouldNotValidateError`. Importing this package loads neither torch nor
transformers.
"""

from taut_deploy.validate.errors import CouldNotValidateError
from taut_deploy.validate.job import (
    Metric,
    Progress,
    RuleOutcome,
    ValidationJob,
    ValidationResult,
    Verdict,
)

__all__ = [
    "CouldNotValidateError",
    "Metric",
    "Progress",
    "RuleOutcome",
    "ValidationJob",
    "ValidationResult",
    "Verdict",
    "run_validation",
]


def run_validation(job: ValidationJob) -> ValidationResult:
    """Compare two models and write the report.

    Args:
        job: what to compare, on which text and against which policy.

    Returns:
        The verdict; ``report.json`` and ``report.md`` lie in ``job.output``.

    Raises:
        CouldNotValidateError: the comparison could not be made (exit code 3); nothing was written.
        OutputError: the report could not be written.
    """
    from taut_deploy.validate.run import run  # here, so that `taut --help` does not load torch

    return run(job)
