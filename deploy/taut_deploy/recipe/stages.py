"""The stages a recipe may hold: one strict model each.

``order`` says where a stage may stand; a recipe's stages must not step back in it. What a stage
does is in :mod:`taut_deploy.compress.stages`, under the same ``method``.
"""

from enum import IntEnum
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from taut_deploy.compress.train.settings import TrainSettings
from taut_deploy.recipe.patterns import Pattern, is_matched
from taut_deploy.recipe.schemes import SCHEMES, SchemeName

ShareToKeep = Annotated[float, Field(gt=0.0, lt=1.0)]


class Order(IntEnum):
    """Where a stage stands among the others.

    Whole-model stages run before or after the blocks. The others run block by block: transforms
    keep the block's function, pruning sets weights to zero, storing chooses how a layer is kept.
    """

    BEFORE = 0
    TRANSFORM = 1
    PRUNE = 2
    STORE = 3
    AFTER = 4


class Strict(BaseModel):
    """A part of a recipe: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StageModel(Strict):
    """What every stage can be told.

    ``layers`` picks the linear layers it acts on by their full names, ``ignore`` leaves some of
    those out; both are shell wildcards, or regular expressions after ``re:``.
    """

    order: ClassVar[Order]
    added_later: ClassVar[frozenset[str]] = frozenset({"layers", "ignore"})
    """Keys younger than the first recipes: at their default they are no part of the hash, so that
    a checkpoint made before them is still the one its recipe asks for."""

    layers: Annotated[tuple[Pattern, ...], Field(min_length=1)] = ("*",)
    ignore: tuple[Pattern, ...] = ()

    def selects(self, name: str) -> bool:
        """Say whether the stage acts on the layer of this full name."""
        return is_matched(name, self.layers) and not is_matched(name, self.ignore)

    @property
    def needs_hessian(self) -> bool:
        """Whether it needs ``x xᵀ`` of its inputs, the dearest statistic."""
        return False

    def hashed(self) -> dict[str, object]:
        """Everything that changes the result, as plain data."""
        fields = type(self).model_fields
        left_out = {
            key for key in self.added_later if getattr(self, key) == fields[key].get_default()
        }
        return self.model_dump(mode="json", exclude=left_out)


class Smooth(StageModel):
    """Move activation outliers into the weights (SmoothQuant, arXiv:2211.10438, §4).

    ``alpha`` is the migration strength, or ``auto`` to choose it per input group by measured output
    error.
    """

    order: ClassVar[Order] = Order.TRANSFORM

    method: Literal["smooth"] = "smooth"
    alpha: Annotated[float, Field(ge=0.0, le=1.0)] | Literal["auto"] = "auto"


class Awq(StageModel):
    """Scale up input channels that matter before they are rounded (AWQ, arXiv:2306.00978, §3.2).

    A ``quantize`` stage follows; an input whose producer cannot take factors is left as it is.
    """

    order: ClassVar[Order] = Order.TRANSFORM

    method: Literal["awq"] = "awq"

    @property
    def needs_hessian(self) -> bool:
        """Whether it needs ``x xᵀ`` of its inputs."""
        return True


class Prune(StageModel):
    """Set weights to zero and keep them there.

    ``sparsity`` is the share to remove, ``pattern`` how many of every run of input channels stay;
    exactly one of them is given. Magnitude compares the weights of a layer, Wanda those of a row,
    SparseGPT those of 128 columns. ``refit`` then gives the weights that stay the values which
    reproduce the layer's output best.
    """

    order: ClassVar[Order] = Order.PRUNE

    method: Literal["prune"] = "prune"
    algorithm: Literal["magnitude", "wanda", "sparsegpt"] = "sparsegpt"
    sparsity: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    pattern: Literal["2:4", "4:8"] | None = None
    refit: bool = True
    dampening_frac: Annotated[float, Field(gt=0.0, le=1.0)] = 0.01

    @model_validator(mode="after")
    def _one_target(self) -> "Prune":
        if (self.sparsity is None) == (self.pattern is None):
            raise ValueError("give either 'sparsity', such as 0.5, or 'pattern', 2:4 or 4:8")
        return self

    @property
    def needs_hessian(self) -> bool:
        """Whether it needs ``x xᵀ`` of its inputs."""
        return self.refit or self.algorithm != "magnitude"


class Quantize(StageModel):
    """Round weights, and inputs where the scheme says so.

    ``group_size`` is an upper bound: the largest of 128, 64, 32 that is not above it and divides
    every layer of the stage is used. ``rtn`` and ``hqq`` need no data. ``act_order`` orders GPTQ's
    columns by importance while groups stay in place, so the file needs no index.
    """

    order: ClassVar[Order] = Order.STORE

    method: Literal["quantize"] = "quantize"
    scheme: SchemeName
    algorithm: Literal["rtn", "hqq", "gptq"] = "gptq"
    group_size: Literal[32, 64, 128, "channel"] | None = None
    symmetric: bool = True
    act_order: bool = True
    dampening_frac: Annotated[float, Field(gt=0.0, le=1.0)] = 0.01

    @model_validator(mode="after")
    def _fits_scheme(self) -> "Quantize":
        rules = SCHEMES[self.scheme]
        if not rules.grouped and (self.group_size is not None or not self.symmetric):
            raise ValueError(
                f"{self.scheme} has one granularity of scales and no zero points: drop "
                "'group_size' and 'symmetric: false'"
            )
        if not rules.zero_points and not self.symmetric:
            raise ValueError(f"{self.scheme} has no zero points: drop 'symmetric: false'")
        if self.group_size == "channel" and not rules.by_channel:
            raise ValueError(f"{self.scheme} needs 'group_size' 32, 64 or 128: vLLM takes no other")
        if rules.grouped and self.group_size is None:
            raise ValueError(
                f"{self.scheme} needs 'group_size' (32, 64 or 128; 'channel' for one scale a row)"
            )
        return self

    @property
    def num_bits(self) -> int:
        """Bits per weight, scales not counted."""
        return SCHEMES[self.scheme].num_bits

    @property
    def needs_hessian(self) -> bool:
        """Whether it needs ``x xᵀ`` of its inputs."""
        return self.algorithm == "gptq"


class WholeModel(StageModel):
    """A stage that has the whole model in memory, before or after the blocks."""

    @model_validator(mode="after")
    def _of_all_layers(self) -> "WholeModel":
        if self.layers != ("*",) or self.ignore:
            raise ValueError("acts on the whole model: drop 'layers' and 'ignore'")
        return self


class Slim(WholeModel):
    """Cut out what matters least on the calibration text; see ``taut slim``.

    Each axis says what share of it stays: neurons of the FFN, heads by key-value group, hidden
    channels, blocks.
    """

    order: ClassVar[Order] = Order.BEFORE

    method: Literal["slim"] = "slim"
    ffn: ShareToKeep | None = None
    heads: ShareToKeep | None = None
    hidden: ShareToKeep | None = None
    depth: ShareToKeep | None = None

    @model_validator(mode="after")
    def _has_an_axis(self) -> "Slim":
        if not self.shares:
            raise ValueError("give the share to keep of 'ffn', 'heads', 'hidden' or 'depth'")
        return self

    @property
    def shares(self) -> dict[str, float]:
        """Of each axis that shrinks."""
        given = {"ffn": self.ffn, "heads": self.heads, "hidden": self.hidden, "depth": self.depth}
        return {axis: share for axis, share in given.items() if share is not None}


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

    Master weights start from the base model within the cells of their codes; gradients go straight
    through the rounding.
    """

    method: Literal["qat"] = "qat"
    start: Literal["codes", "base", "cells"] = "cells"


Stage = Annotated[
    Smooth | Awq | Prune | Quantize | Slim | Distil | Qat, Field(discriminator="method")
]
STAGE_MODELS: dict[str, type[StageModel]] = {
    model.model_fields["method"].default: model for model in get_args(get_args(Stage)[0])
}
"""By ``method``."""
