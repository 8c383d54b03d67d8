"""What tries share: calibration tokens, and the scores that mixtures are chosen by.

Both are made once for a model, kept beside the tries and put into a compression's workspace before
it begins, which then finds them as a resumed run does. The bytes of a checkpoint are the same.
"""

from pathlib import Path

import torch

from taut_deploy.compress.calibrate.calibration import CalibrationSet
from taut_deploy.compress.calibrate.kept import kept_calibration
from taut_deploy.compress.job import CompressionJob, fingerprint, open_stream, stored_dtype
from taut_deploy.compress.mixed.decide import mixing_of
from taut_deploy.compress.workspace import Workspace
from taut_deploy.files import sha256_json
from taut_deploy.progress import Report
from taut_deploy.recipe import Mixed, Order

_CALIBRATION = "calibration"
_SCORES = "scores"


class Shared:
    """The kept parts of all tries of one model.

    Args:
        folder: to keep them in.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tokens(self, job: CompressionJob, progress: Report) -> torch.Tensor:
        """The calibration tokens of a job's recipe, [sequences, sequence_length] int64.

        Args:
            job: whose recipe says which.
            progress: told what is made.

        Raises:
            RecipeError: the text is too short or missing.
            ModelError: a text cannot be downloaded.
        """
        return self._calibration(job, progress).tokens

    def hand_over(self, job: CompressionJob, progress: Report) -> None:
        """Put what the job would make first into its workspace.

        Args:
            job: not finished; one with stages of the whole model makes its own.
            progress: told what is made.

        Raises:
            RecipeError: a text is too short, or the mixture's target cannot be met.
            ModelError: a text cannot be downloaded.
        """
        if job.recipe.of_orders(Order.BEFORE, Order.AFTER):
            return
        made = self._calibration(job, progress)
        own = Workspace(job.output, fingerprint(job), resume=True)
        if own.committed(_CALIBRATION) is None:
            own.save_tensors(_CALIBRATION, {"tokens": made.tokens})
            own.commit(_CALIBRATION, made.description)
        mixed = next((one for one in job.recipe.stages if isinstance(one, Mixed)), None)
        if mixed is None or own.committed(_SCORES) is not None:
            return
        scores = self._workspace(job, mixed)
        if scores.committed(_SCORES) is None:
            directory = Path(job.model.path)
            stream = open_stream(job)
            mixing = mixing_of(stream, job.recipe, directory, stored_dtype(directory))
            assert mixing is not None  # noqa: S101 - narrows the type
            total = len(stream.blocks)
            mixing.decided(
                scores,
                lambda: made.tokens,
                lambda block: progress(block.index, total, f"scoring {block.name}"),
            )
        own.commit(_SCORES, scores.committed(_SCORES))

    def _calibration(self, job: CompressionJob, progress: Report) -> CalibrationSet:
        kept = self._workspace(job, None)
        return kept_calibration(job, kept, lambda: progress(0, 1, "preparing calibration tokens"))

    def _workspace(self, job: CompressionJob, mixed: Mixed | None) -> Workspace:
        """Where the tokens of a recipe are kept, or the scores of its mixture."""
        settings: dict[str, object] = {"calibration": job.recipe.calibration.model_dump()}
        if mixed is not None:
            # Scores do not depend on the target.
            stage = mixed.model_dump(exclude=set(mixed.target))
            settings |= {"mixed": stage, "ignore": job.recipe.ignore}
        determined = {**fingerprint(job), "recipe_hash": sha256_json(settings)}
        return Workspace(self._folder / sha256_json(determined)[:16], determined, resume=True)
