"""The stages a recipe may hold: one strict model each.

Those that run block by block are here, those of the whole model in
:mod:`taut_deploy.recipe.whole_model`. What a stage does is in :mod:`taut_deploy.compress.stages`,
under the same ``method``.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, PrivateAttr, model_validator

from taut_deploy.recipe.quanto import Quanto
from taut_deploy.recipe.schemes import SCHEMES, SchemeName
from taut_deploy.recipe.stage import Order, StageModel, Strict
from taut_deploy.recipe.whole_model import Distil, Qat, Rotate, Slim, Training

__all__ = [
    "STAGE_MODELS",
    "Awq",
    "Distil",
    "Factorize",
    "Mixed",
    "Order",
    "Palettize",
    "Prune",
    "Qat",
    "Quantize",
    "Quanto",
    "Residual",
    "Rotate",
    "Slim",
    "Smooth",
    "Stage",
    "StageModel",
    "Strict",
    "Training",
]


class Reconstructed(StageModel):
    """A stage after which ``steps`` steps may fit what it left to the original block's output."""

    added_later: ClassVar[frozenset[str]] = StageModel.added_later | {"steps"}

    steps: Annotated[int, Field(ge=1, le=5000)] | None = None

    @property
    def needs_target(self) -> bool:
        """Whether it needs what the original model's block gives at full precision."""
        return self.steps is not None


class Allocated(Reconstructed):
    """A stage that gives all layers the same, or each what scores decide (``allocation: loss``)."""

    added_later: ClassVar[frozenset[str]] = Reconstructed.added_later | {"allocation"}

    allocation: Literal["uniform", "loss"] = "uniform"
    _of_layers: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    def allocated(self, of_layers: Mapping[str, Any]) -> Self:
        """The stage with what was decided for each layer, by full name."""
        decided = self.model_copy()
        decided._of_layers = of_layers
        return decided


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


class Prune(Allocated):
    """Set weights to zero and keep them there.

    ``sparsity`` is the share to remove, ``pattern`` how many of every run of input channels stay;
    exactly one of them is given. Magnitude compares the weights of a layer, Wanda those of a row,
    SparseGPT those of 128 columns. ``refit`` then gives the weights that stay the values which
    reproduce the layer's output best, and ``steps`` steps those that reproduce the block's.
    With ``allocation: loss`` ``sparsity`` is the mean, and layers that cost the model more keep
    more (after OWL, arXiv:2310.05175).
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
        if self.allocation != "uniform" and self.sparsity is None:
            raise ValueError("'allocation: loss' goes with 'sparsity': a pattern fixes every run")
        return self

    def sparsity_of(self, name: str) -> float | None:
        """The share that a layer loses; None where a pattern says it."""
        found: float | None = self._of_layers.get(name, self.sparsity)
        return found

    @property
    def needs_hessian(self) -> bool:
        """Whether it needs ``x xᵀ`` of its inputs."""
        return self.refit or self.algorithm != "magnitude"


class Quantize(StageModel):
    """Round weights, and inputs where the scheme says so.

    ``group_size`` is an upper bound: the largest of 128, 64, 32 that is not above it and divides
    every layer of the stage is used. ``rtn`` and ``hqq`` need no data. ``act_order`` orders GPTQ's
    columns by importance while groups stay in place, so the file needs no index. ``round`` begins
    at GPTQ's codes and moves those of a whole block together, for ``steps`` steps (100), until
    the block's output is closest to the original model's (AutoRound, arXiv:2309.05516, §3), inputs
    rounded as the scheme says; it learns integers and FP8 by channel.
    """

    order: ClassVar[Order] = Order.STORE
    added_later: ClassVar[frozenset[str]] = StageModel.added_later | {"steps"}

    method: Literal["quantize"] = "quantize"
    scheme: SchemeName
    algorithm: Literal["rtn", "hqq", "gptq", "round"] = "gptq"
    group_size: Literal[32, 64, 128, "channel"] | None = None
    symmetric: bool = True
    act_order: bool = True
    dampening_frac: Annotated[float, Field(gt=0.0, le=1.0)] = 0.01
    steps: Annotated[int, Field(ge=1, le=200)] | None = None

    @model_validator(mode="after")
    def _steps_go_with_round(self) -> "Quantize":
        if self.steps is not None and self.algorithm != "round":
            raise ValueError(f"{self.algorithm} takes no steps: drop 'steps'")
        return self

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
        return self.algorithm in {"gptq", "round"}

    @property
    def needs_target(self) -> bool:
        """Whether it needs what the original model's block gives at full precision."""
        return self.algorithm == "round"


class Mixed(StageModel):
    """Give every layer the candidate that serves the model best within a target.

    Exactly one target: ``target_bits``, stored bits a weight of its layers, scales included;
    ``target_bytes``, of all weights of the checkpoint; ``max_kl``, predicted divergence in nats.
    ``candidates`` are what ``quantize`` takes, without ``layers`` and ``ignore``.
    """

    order: ClassVar[Order] = Order.STORE

    method: Literal["mixed"] = "mixed"
    candidates: Annotated[tuple[Quantize, ...], Field(min_length=2)]
    target_bits: Annotated[float, Field(gt=0.0, le=16.0, allow_inf_nan=False)] | None = None
    target_bytes: Annotated[int, Field(gt=0)] | None = None
    max_kl: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _one_target(self) -> "Mixed":
        if sum(value is not None for value in self.target.values()) != 1:
            raise ValueError(f"give exactly one of {', '.join(map(repr, self.target))}")
        if any(one.layers != ("*",) or one.ignore for one in self.candidates):
            raise ValueError("'candidates': drop 'layers' and 'ignore'; the stage has its own")
        return self

    @property
    def target(self) -> dict[str, float | None]:
        """Every target by its key, None where it is not the one."""
        keys = ("target_bits", "target_bytes", "max_kl")
        return {key: getattr(self, key) for key in keys}

    @property
    def needs_hessian(self) -> bool:
        """Whether a candidate needs ``x xᵀ`` of its inputs."""
        return any(one.needs_hessian for one in self.candidates)


class Residual(Strict):
    """4-bit weights, and a low-rank correction of what rounding got wrong.

    Sources: LQER, arXiv:2402.02446, §3; EoRA, arXiv:2410.21271, §3. ``passes`` is how often weight
    less correction is rounded anew; the best pass is kept.
    """

    rank: Annotated[int, Field(ge=1)]
    scheme: Literal["W4A16"] = "W4A16"
    group_size: Literal[32, 64, 128, "channel"] = 128
    symmetric: bool = True
    passes: Annotated[int, Field(ge=1, le=16)] = 4


class Factorize(Allocated):
    """Make a weight of two thin ones (SVD-LLM, arXiv:2403.07378, §3.1), or correct a rounded one.

    Exactly one of three: ``rank_budget``, the share of its parameters that a layer keeps; ``rank``,
    the same for every layer; ``residual``, which keeps 4-bit weights beside the factors. ``steps``
    steps then fit the factors to the block's output. With ``allocation: loss`` ``rank_budget`` is
    the share that all layers keep together, and those that cost the model more keep more.
    """

    order: ClassVar[Order] = Order.STORE
    keeps_zeros: ClassVar[bool] = False

    method: Literal["factorize"] = "factorize"
    rank_budget: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    rank: Annotated[int, Field(ge=1)] | None = None
    residual: Residual | None = None
    dampening_frac: Annotated[float, Field(gt=0.0, le=1.0)] = 0.001

    @model_validator(mode="after")
    def _one_size(self) -> "Factorize":
        given = [key for key in ("rank_budget", "rank", "residual") if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(
                "give exactly one of 'rank_budget', 'rank' and 'residual'"
                + (f", not {' and '.join(given)}" if given else "")
            )
        if self.allocation != "uniform" and self.rank_budget is None:
            raise ValueError(f"'allocation: loss' goes with 'rank_budget', not {given[0]!r}")
        return self

    def rank_of(self, name: str) -> int | None:
        """The rank that a layer was given; None where nothing was decided for it."""
        rank: int | None = self._of_layers.get(name)
        return rank

    @property
    def needs_hessian(self) -> bool:
        """Whether it needs ``x xᵀ`` of its inputs."""
        return True


class Palettize(Reconstructed):
    """Make every weight one of a few values: an index into a book, times the scale of its group.

    Sources: SqueezeLLM, arXiv:2306.07629, §4.1; GPTVQ, arXiv:2402.15319, §3. ``entries`` values
    make a book, which all rows of a layer share, or every ``rows`` of them. ``group_size`` is
    an upper bound, as for ``quantize``; values are relative to a group's largest. ``refits`` is how
    often books are fitted to the indices and these chosen anew. ``steps`` steps then learn
    indices and scales, and as many books and scales, by the block's output.
    """

    order: ClassVar[Order] = Order.STORE
    keeps_zeros: ClassVar[bool] = False

    method: Literal["palettize"] = "palettize"
    entries: Literal[16, 8, 4]
    group_size: Literal[32, 64, 128, "channel"] = 64
    rows: Annotated[int, Field(ge=1)] | None = None
    refits: Annotated[int, Field(ge=0, le=16)] = 2
    dampening_frac: Annotated[float, Field(gt=0.0, le=1.0)] = 0.01

    @property
    def needs_hessian(self) -> bool:
        """Whether it needs ``x xᵀ`` of its inputs."""
        return True


_Stored = Quantize | Quanto | Mixed | Factorize | Palettize
Stage = Annotated[
    Smooth | Awq | Prune | _Stored | Rotate | Slim | Distil | Qat, Field(discriminator="method")
]
STAGE_MODELS: dict[str, type[StageModel]] = {
    model.model_fields["method"].default: model for model in get_args(get_args(Stage)[0])
}
"""By ``method``."""
