"""One recipe: its calibration, its stages in order, and where it comes from."""

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from taut_deploy.errors import RecipeError
from taut_deploy.files import sha256_json
from taut_deploy.recipe.patterns import Pattern
from taut_deploy.recipe.stages import (
    Factorize,
    Mixed,
    Order,
    Palettize,
    Prune,
    Qat,
    Quantize,
    Rotate,
    Slim,
    Stage,
    Strict,
    Training,
)
from taut_deploy.recipe.tables import Table
from taut_deploy.strict_yaml import (
    parse_mapping,
    read_shipped_or_file,
    shipped_names,
    validate_mapping,
)

CalibrationSource = Literal["corpus", "articles", "self", "file"]


class Calibration(Strict):
    """Where calibration tokens come from; never the text a result is judged on.

    ``source`` is ``corpus`` (public-domain prose) or ``articles`` (of an encyclopaedia), both from
    pinned packages, ``self`` (sampled from the model), ``file`` with ``path``, or several of them
    with weights: ``{corpus: 1, articles: 2}``. Beside texts, ``self`` goes on from pieces of them.
    A file is plain text, or ``.jsonl`` with a document a line under ``text``.
    """

    source: (
        CalibrationSource
        | Annotated[
            dict[CalibrationSource, Annotated[float, Field(gt=0.0, allow_inf_nan=False)]],
            Field(min_length=1),
        ]
    ) = "corpus"
    path: str | None = None
    sequences: Annotated[int, Field(ge=1, le=4096)] = 32
    sequence_length: Annotated[int, Field(ge=16, le=32768)] = 512
    seed: int = 0

    @model_validator(mode="after")
    def _path_goes_with_file(self) -> "Calibration":
        if ("file" in self.weights) != (self.path is not None):
            raise ValueError("'path' is given exactly when 'source' is 'file'")
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Of every source, by its name."""
        if isinstance(self.source, str):
            return {self.source: 1.0}
        return {str(name): weight for name, weight in self.source.items()}

    @property
    def texts(self) -> tuple[str, ...]:
        """Sources that are written already: names of built-in texts, and the file's path."""
        return tuple(
            str(self.path) if name == "file" else name for name in self.weights if name != "self"
        )


_MARGIN = 2.0


class KvCache(Strict):
    """An 8-bit KV cache.

    FP8 has scales from calibration: ``strategy`` gives every attention layer one scale for keys and
    one for values (``tensor``), or each of its heads its own (``head``; vLLM serves those with
    FlashAttention 3 alone), and ``margin`` is the room above what calibration saw: a factor of two
    costs a float nothing. INT8 has a scale for every token and head (``token-head``), which vLLM
    makes as it writes; nothing is stored of it but that ``taut worker`` asks for it.
    """

    dtype: Literal["fp8", "int8"] = "fp8"
    strategy: Literal["tensor", "head", "token-head"] = "tensor"
    margin: Annotated[float, Field(ge=1.0, le=16.0)] = _MARGIN

    @model_validator(mode="before")
    @classmethod
    def _strategy_of_dtype(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("dtype") == "int8":
            return {"strategy": "token-head", **data}
        return data

    @model_validator(mode="after")
    def _served(self) -> "KvCache":
        if (self.dtype == "int8") != (self.strategy == "token-head"):
            raise ValueError(
                "vLLM keeps INT8 with scales for every token and head ('token-head'), and reads "
                "stored scales for FP8 alone ('tensor' or 'head'); drop 'strategy'"
            )
        if self.dtype == "int8" and self.margin != _MARGIN:
            raise ValueError("int8 spans what each token holds: drop 'margin'")
        return self


class Recipe(Strict):
    """One compression recipe."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")]
    description: str = ""
    calibration: Calibration = Calibration()
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    ignore: tuple[Pattern, ...] = ("lm_head",)
    kv_cache: KvCache | None = None
    embeddings: Table | None = None
    head: Table | None = None
    _stages_before: int = PrivateAttr(default=0)

    @model_validator(mode="after")
    def _in_order(self) -> "Recipe":
        for first, second in pairwise(self.stages):
            if second.order < first.order:
                raise ValueError(f"'stages': {second.method!r} must stand before {first.method!r}")
        orders = {stage.order for stage in self.stages}
        smaller = {Order.PRUNE, Order.STORE}
        rotates = any(isinstance(stage, Rotate) for stage in self.stages)
        if (Order.TRANSFORM in orders or rotates) and not orders & smaller:
            raise ValueError(
                "'stages': nothing makes the model smaller; a transform is followed by 'quantize'"
            )
        if orders == {Order.AFTER}:
            raise ValueError(
                "'stages': there is nothing to train back; put 'quantize', 'prune' or 'slim' first"
            )
        kinds = {type(stage) for stage in self.stages}
        if Qat in kinds and Quantize not in kinds:
            raise ValueError("'stages': 'qat' trains through rounding; put 'quantize' before it")
        if self.kv_cache is not None and not orders - {Order.BEFORE, Order.AFTER}:
            raise ValueError("'kv_cache': is calibrated block by block; add 'quantize' or 'prune'")
        self._require_tables_alone()
        self._require_like_shapes()
        self._require_scored_once()
        self._require_like_basis()
        self._require_like_scales()
        self._require_trainable()
        return self

    def _require_tables_alone(self) -> None:
        whole = self.of_orders(Order.BEFORE, Order.AFTER)
        for key in self.tables if whole else ():
            raise ValueError(
                f"'{key}': {whole[0].method!r} works on the whole model with dense embeddings; "
                f"leave out {key!r} or {whole[0].method!r}"
            )

    @model_validator(mode="after")
    def _enough_to_judge(self) -> "Recipe":
        if self.needs_target and self.calibration.sequences < 2:
            raise ValueError(
                "'calibration.sequences': learning by a block's output needs at least 2"
            )
        return self

    def _require_scored_once(self) -> None:
        scored = [one for one in self.stages if isinstance(one, Mixed) or is_allocated(one)]
        if len(scored) > 1 or (scored and self.of_orders(Order.BEFORE)):
            raise ValueError(
                "'stages': one 'mixed' at most or one stage with 'allocation: loss', and none "
                "after 'slim' or 'rotate'"
            )

    def _require_trainable(self) -> None:
        training = [stage.method for stage in self.stages if isinstance(stage, Training)]
        for stage in self.stages if training else ():
            fixed = isinstance(stage, Palettize)
            if fixed or (isinstance(stage, Factorize) and stage.residual is not None):
                what = "codebooks" if fixed else "a low-rank 'residual'"
                raise ValueError(f"'stages': {what} cannot be trained; leave out {training[0]!r}")

    def _require_like_shapes(self) -> None:
        slims = [stage for stage in self.stages if isinstance(stage, Slim)]
        for stage in self.stages if slims else ():
            if isinstance(stage, Training) and stage.hidden and any(one.hidden for one in slims):
                raise ValueError(
                    "'stages': after 'slim' by 'hidden' the states have other widths than the base "
                    f"model's; set 'hidden' of {stage.method!r} to 0"
                )

    def _require_like_basis(self) -> None:
        before = self.of_orders(Order.BEFORE)
        places = [i for i, stage in enumerate(before) if isinstance(stage, Rotate)]
        if not places:
            return
        if places != [len(before) - 1]:
            raise ValueError("'stages': 'rotate' stands once, after 'slim' and before the others")
        for stage in self.stages if places != [0] else ():
            if isinstance(stage, Training) and stage.hidden:
                raise ValueError(
                    "'stages': after 'slim' and 'rotate' states are in another basis than those of "
                    f"any whole model: set 'hidden' of {stage.method!r} to 0"
                )

    def _require_like_scales(self) -> None:
        transforms = self.of_orders(Order.TRANSFORM)
        for stage in self.stages if transforms else ():
            if isinstance(stage, Training) and stage.start != "codes":
                raise ValueError(
                    f"'stages': {transforms[0].method!r} changes the scale of weights, and "
                    f"{stage.start!r} would take the unchanged ones: {stage.method!r} must start "
                    "from 'codes'"
                )

    @property
    def tables(self) -> dict[str, Table]:
        """How embeddings and head are stored, those that are not dense, by key."""
        both = {"embeddings": self.embeddings, "head": self.head}
        return {key: table for key, table in both.items() if table is not None}

    def of_orders(self, *orders: Order) -> list[Stage]:
        """Its stages that stand there."""
        return [stage for stage in self.stages if stage.order in orders]

    def of_blocks(self) -> "Recipe | None":
        """The part that is done block by block, None where there is none."""
        stages = self.of_orders(Order.TRANSFORM, Order.PRUNE, Order.STORE)
        if not stages:
            return None
        part = self.model_copy(update={"stages": tuple(stages)})
        part._stages_before = len(self.of_orders(Order.BEFORE))
        return part

    def place(self, index: int) -> str:
        """What an error calls a stage: its place in the recipe as the user wrote it."""
        return f"stages.{self._stages_before + index}"

    @property
    def needs_hessian(self) -> bool:
        """Whether any stage needs ``x xᵀ`` of its inputs."""
        return any(stage.needs_hessian for stage in self.stages)

    @property
    def needs_target(self) -> bool:
        """Whether any stage needs what the original model's blocks give at full precision."""
        return any(stage.needs_target for stage in self.stages)

    def as_json(self) -> dict[str, object]:
        """The recipe as plain data, defaults filled in."""
        return self.model_dump(mode="json")

    @property
    def hash(self) -> str:
        """``sha256:`` over everything that changes the result (name and description do not)."""
        plain = self.model_dump(mode="json", exclude={"name", "description", "stages"})
        for key in ("kv_cache", "embeddings", "head"):
            if plain[key] is None:  # younger than the first recipes, whose hashes stay
                del plain[key]
        return "sha256:" + sha256_json(
            {**plain, "stages": [stage.hashed() for stage in self.stages]}
        )


def is_allocated(stage: Stage) -> bool:
    """Whether what each of a stage's layers gets is decided by scores."""
    return isinstance(stage, Prune | Factorize) and stage.allocation == "loss"


def builtin_recipes() -> list[str]:
    """Names of the recipes that ship with taut."""
    return shipped_names("taut_deploy", "recipes")


def load_recipe(reference: str) -> Recipe:
    """Load a recipe by built-in name or from a YAML file.

    Raises:
        RecipeError: no such recipe, not YAML, or a wrong key or value (named).
    """
    text = read_shipped_or_file(reference, "taut_deploy", "recipes", "recipe", RecipeError)
    return parse_recipe(text, reference)


def parse_recipe(text: str, origin: str) -> Recipe:
    """Parse recipe YAML; ``origin`` is named in errors.

    Raises:
        RecipeError: naming the key and what is wrong with it.
    """
    data = parse_mapping(text, origin, RecipeError, "'name' and 'stages'")
    return validate_mapping(Recipe, data, origin, RecipeError)
