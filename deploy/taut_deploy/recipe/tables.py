"""How a recipe has embeddings and head stored: tables with one row for every token."""

from typing import Literal

from taut_deploy.recipe.stage import Strict


class Table(Strict):
    """Integers of 8 or 4 bits, rounded to the nearest, which wants no text.

    ``group_size`` is an upper bound, as for ``quantize``; left out, 8 bits have one scale a row and
    4 bits groups of up to 64.
    """

    bits: Literal[8, 4]
    group_size: Literal[32, 64, 128, "channel"] | None = None

    @property
    def largest_group(self) -> int | None:
        """The upper bound of groups; None for one scale a row."""
        if self.group_size is None:
            return 64 if self.bits == 4 else None
        return None if self.group_size == "channel" else self.group_size
