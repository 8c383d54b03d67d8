"""A recipe that is decided by scores, which the run's workspace keeps."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from taut_deploy.compress.source.decoder import DecoderBlock
from taut_deploy.compress.workspace import Workspace
from taut_deploy.recipe import Recipe


class ScoredRecipe(ABC):
    """A recipe one stage of which is not decided yet."""

    kept_as: ClassVar[str]
    """Name of the scores in the workspace."""

    def decided(
        self,
        workspace: Workspace,
        tokens: Callable[[], torch.Tensor],
        progress: Callable[[DecoderBlock], None],
    ) -> tuple[Recipe, dict[str, Any]]:
        """The recipe that can be run, and what the manifest says of the choice.

        Args:
            workspace: keeps the scores.
            tokens: makes those of the calibration, [B, T].
            progress: told each block before it is scored.

        Raises:
            RecipeError: the stage's target cannot be met.
        """
        scores = workspace.once(self.kept_as, lambda: self._scores(tokens(), progress))
        return self._resolved(scores)

    @abstractmethod
    def _scores(
        self, tokens: torch.Tensor, progress: Callable[[DecoderBlock], None]
    ) -> list[dict[str, Any]]:
        """Those of each unit, as plain data."""

    @abstractmethod
    def _resolved(self, scores: list[dict[str, Any]]) -> tuple[Recipe, dict[str, Any]]:
        """What the scores decide."""
