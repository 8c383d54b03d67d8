"""What every stage of a recipe has: its place among the others, and the layers it picks."""

from enum import IntEnum
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from taut_deploy.recipe.patterns import Pattern, is_matched


class Order(IntEnum):
    """Where a stage stands among the others; a recipe's stages must not step back in it.

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
    keeps_zeros: ClassVar[bool] = True
    """Whether what an earlier stage pruned stays zero."""
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

    @property
    def needs_target(self) -> bool:
        """Whether it needs what the original model's block gives at full precision."""
        return False

    def hashed(self) -> dict[str, object]:
        """Everything that changes the result, as plain data."""
        fields = type(self).model_fields
        left_out = {
            key for key in self.added_later if getattr(self, key) == fields[key].get_default()
        }
        return self.model_dump(mode="json", exclude=left_out)
