"""What ``taut shrink`` is asked for."""

from dataclasses import dataclass, replace
from pathlib import Path

from taut_deploy.compress.job import CompressionJob
from taut_deploy.frontier.limits import SizeLimit
from taut_deploy.models.store import ModelRecord
from taut_deploy.recipe import Recipe
from taut_deploy.validate import Progress, ValidationJob
from taut_deploy.validate.policy import Policy


@dataclass(frozen=True)
class ShrinkRequest:
    """One search for the smallest checkpoint that passes.

    Args:
        model: the base model.
        recipes: to try; one with a ``mixed`` stage gives a candidate for each of ``target_bits``.
        target_bits: of mixtures, bits a weight.
        limit: on the size of candidates, or None.
        policy: that decides.
        validation: the comparison of a candidate with the model; its candidate and its output
            stand for those of each try.
        served_by: where the checkpoint is to run: ``here``, ``cpu`` or a card.
        output: directory of ledger, tries, reports and results.
        cache: where calibration texts are kept.
        budget_s: seconds after which nothing more is begun, None for no end.
        keep_all: keep the checkpoints of tries that did not pass, too.
        requantize: take a model whose weights were rounded already.
    """

    model: ModelRecord
    recipes: tuple[Recipe, ...]
    target_bits: tuple[float, ...]
    limit: SizeLimit | None
    policy: Policy
    validation: ValidationJob
    served_by: str
    output: Path
    cache: Path
    budget_s: float | None = None
    keep_all: bool = False
    requantize: bool = False

    @property
    def directory(self) -> Path:
        """Of the base model."""
        return Path(self.model.path)

    @property
    def tries(self) -> Path:
        """Where checkpoints are made."""
        return self.output / "tries"

    def job(self, recipe: Recipe, place: str) -> CompressionJob:
        """The compression of a recipe.

        Args:
            recipe: what to do.
            place: name of the checkpoint's directory.
        """
        return CompressionJob(
            self.model,
            recipe,
            self.tries / place,
            self.cache,
            self.validation.directories.device,
            trust_remote_code=self.validation.directories.trust_remote_code,
            requantize=self.requantize,
        )

    def comparison(self, place: str, progress: Progress) -> ValidationJob:
        """The validation of a candidate's checkpoint.

        Args:
            place: name of its directory.
            progress: told stage, steps done, and steps in all.
        """
        return replace(
            self.validation,
            candidate=str(self.tries / place),
            output=self.output / "reports" / place,
            progress=progress,
        )
