"""The calibration set of a run: made once, then read from its workspace."""

from collections.abc import Callable
from pathlib import Path

from taut_deploy.compress.calibrate.calibration import CalibrationSet, make_calibration_set
from taut_deploy.compress.golden import tokenize_prompts
from taut_deploy.compress.job import CompressionJob
from taut_deploy.compress.workspace import Workspace


def kept_calibration(
    job: CompressionJob, workspace: Workspace, before_making: Callable[[], None]
) -> CalibrationSet:
    """The set the job's recipe asks for; one prompt where weights alone are asked.

    Args:
        job: to make it for.
        workspace: where it is kept.
        before_making: called where it is not there yet.

    Raises:
        RecipeError: the text is too short or missing.
        ModelError: the corpus cannot be downloaded.
    """
    if job.workers:
        prompts = tokenize_prompts(Path(job.model.path), trust_remote_code=job.trust_remote_code)
        return CalibrationSet(prompts[0], "none: weights alone")
    saved = workspace.tensors("calibration")
    description = workspace.committed("calibration")
    if saved is not None and description is not None:
        return CalibrationSet(saved["tokens"], description)
    before_making()
    made = make_calibration_set(
        job.recipe.calibration,
        job.model,
        job.cache,
        device=job.device,
        trust_remote_code=job.trust_remote_code,
    )
    workspace.save_tensors("calibration", {"tokens": made.tokens})
    workspace.commit("calibration", made.description)
    return made
