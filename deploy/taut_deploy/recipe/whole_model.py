"""The stages of the whole model: those before the blocks, and the training after them."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from taut_deploy.compress.train.settings import TrainSettings
from taut_deploy.recipe.stage import Order, StageModel

SLIMMED_AXES = ("ffn", "heads", "hidden", "depth", "experts")
ShareToKeep = Annotated[float, Field(gt=0.0, lt=1.0)]


class WholeModel(StageModel):
    """A stage of the whole model, before or after the blocks."""

    @model_validator(mode="after")
    def _of_all_layers(self) -> "WholeModel":
        if self.layers != ("*",) or self.ignore:
            raise ValueError("acts on the whole model: drop 'layers' and 'ignore'")
        return self


class Slim(WholeModel):
    """Cut out what matters least on the calibration text; see ``taut slim``.

    Each axis says what share of it stays: neurons of the FFN, heads by key-value group, hidden
    channels, blocks; experts of every mixture, with their rows of the router.
    """

    order: ClassVar[Order] = Order.BEFORE
    added_later: ClassVar[frozenset[str]] = WholeModel.added_later | {"experts"}

    method: Literal["slim"] = "slim"
    ffn: ShareToKeep | None = None
    heads: ShareToKeep | None = None
    hidden: ShareToKeep | None = None
    depth: ShareToKeep | None = None
    experts: ShareToKeep | None = None

    @model_validator(mode="after")
    def _has_an_axis(self) -> "Slim":
        if not self.shares:
            raise ValueError(
                "give the share to keep of 'ffn', 'heads', 'experts', 'hidden' or 'depth'"
            )
        return self

    @property
    def shares(self) -> dict[str, float]:
        """Of each axis that shrinks."""
        given = {axis: getattr(self, axis) for axis in SLIMMED_AXES}
        return {axis: share for axis, share in given.items() if share is not None}


class Rotate(WholeModel):
    """Turn the residual stream and the heads' values, so that no channel sticks out.

    Sources: QuaRot, arXiv:2404.00456, §4; SpinQuant, arXiv:2405.16406, §3, R1 and R2. The function
    stays; the norms' weights move into the layers behind them, and tied embeddings are untied.
    ``seed`` chooses the signs of the Hadamard matrices.
    """

    order: ClassVar[Order] = Order.BEFORE

    method: Literal["rotate"] = "rotate"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0


class Training(WholeModel, TrainSettings):
    """Train what the stages before left by the base model; see ``taut distil``.

    ``text`` is ``corpus``, or files; never the text a result is judged on.
    """

    order: ClassVar[Order] = Order.AFTER

    text: Annotated[tuple[str, ...], Field(min_length=1)] = ("corpus",)

    @property
    def settings(self) -> TrainSettings:
        """What the trainer is told."""
        return TrainSettings(**{key: getattr(self, key) for key in TrainSettings.model_fields})


class Distil(Training):
    """Distillation of any student: quantised, pruned, slimmed."""

    method: Literal["distil"] = "distil"


class Qat(Training):
    """Quantisation-aware training: the base model's weights, moved so that they round well.

    Master weights start from those that were rounded (the base model's, or what ``slim`` and
    ``rotate`` left), within the cells of their codes; gradients go straight through the rounding.
    """

    method: Literal["qat"] = "qat"
    start: Literal["codes", "base", "cells"] = "cells"
