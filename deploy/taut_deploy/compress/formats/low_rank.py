"""Two thin factors, alone or beside 4-bit weights they correct: ``weight_u`` and ``weight_v``.

Factors that stand alone are in the interpolative form, which holds a higher rank in the same bytes.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from taut_deploy.compress.formats.protocol import TautFormat, WeightFormat
from taut_deploy.compress.formats.registry import weight_format
from taut_deploy.compress.lowrank.interpolative import interpolative_rank
from taut_deploy.compress.lowrank.whitened_svd import Factors
from taut_deploy.compress.quantize.protocol import Codes
from taut_deploy.recipe.stages import Factorize, Quantize

if TYPE_CHECKING:
    from taut_kernels.for_deploy import layer_description

_MULTIPLE_OF = 8  # 16 bytes in 16 bits: what tensor cores want of an inner width


@dataclass(frozen=True)
class LowRankFormat(TautFormat):
    """Factors [N, r] and [r, K]; alone [N - r, r] and [r, K], with the order of the outputs.

    Args:
        rank: of every layer, or None where each gets what ``rank_budget`` leaves it.
        rank_budget: parameters of the factors over those of the weight, None with ``rank``.
        base: of the weights the factors correct, None where they stand alone.
        dtype: of the factors.
    """

    rank: int | None
    rank_budget: float | None
    base: WeightFormat | None
    dtype: torch.dtype

    @property
    def name(self) -> str:  # type: ignore[override]
        """The scheme."""
        return "LOWRANK" if self.base is None else f"{self.base.name}-LOWRANK"

    @property
    def bits(self) -> int:
        """Of a number in the factors, or of a code where they correct codes."""
        return 8 * self.dtype.itemsize if self.base is None else self.base.bits

    @property
    def group_size(self) -> int | None:
        """Of the corrected codes."""
        return None if self.base is None else self.base.group_size

    @property
    def symmetric(self) -> bool:
        """Of the corrected codes."""
        return True if self.base is None else self.base.symmetric

    def rank_of(self, n: int, k: int) -> int:
        """Inner width of a layer [N, K]; 0 where the budget leaves it none."""
        if self.rank is not None:
            return self.rank
        rank = interpolative_rank(n, k, (self.rank_budget or 0.0) * n * k)
        return rank if rank < _MULTIPLE_OF else rank // _MULTIPLE_OF * _MULTIPLE_OF

    def of_rank(self, rank: int) -> "LowRankFormat":
        """The same with one rank for every layer."""
        return replace(self, rank=rank, rank_budget=None)

    def ranks(self, n: int, k: int) -> range:
        """Inner widths that suit tensor cores and make a layer [N, K] smaller."""
        dense = n * k * self.dtype.itemsize
        top = min(n, k) // _MULTIPLE_OF * _MULTIPLE_OF
        while top > 0 and self.of_rank(top).stored_bytes(n, k) >= dense:
            top -= _MULTIPLE_OF
        return range(_MULTIPLE_OF, top + 1, _MULTIPLE_OF)

    def joined_as(self) -> "LowRankFormat":
        """Parts of a joined layer keep a rank each."""
        return replace(self, rank=None, rank_budget=None)

    def stored_bytes(self, n: int, k: int) -> int:
        """Bytes of a layer [N, K] on disk."""
        rank = self.rank_of(n, k)
        if self.base is None:
            order = torch.int32.itemsize * n
            return rank * (n + k - rank) * self.dtype.itemsize + order
        return rank * (n + k) * self.dtype.itemsize + self.base.stored_bytes(n, k)

    def why_not(self, n: int, k: int) -> str | None:
        """Why a layer [N, K] cannot have this format; None if it can."""
        if self.base is not None and (reason := self.base.why_not(n, k)) is not None:
            return reason
        rank = self.rank_of(n, k)
        if rank < 1:
            return f"rank_budget {self.rank_budget} leaves it no rank"
        if rank > min(n, k):
            return f"rank {rank} is above its smaller width {min(n, k)}"
        if self.stored_bytes(n, k) >= n * k * self.dtype.itemsize:
            alone = self.base is None
            what = "the factors hold" if alone else "codes and factors hold"
            return f"rank {rank} saves nothing: {what} no fewer bytes than the weight"
        return None

    def describe(self, n: int, k: int) -> "layer_description.LowRank":
        """What ``quantization_config`` says of a layer [N, K]."""
        from taut_kernels.for_deploy import layer_description as told

        base = None
        if self.base is not None:
            base = told.PackedBase(self.base.group_size, self.base.symmetric)
        return told.LowRank(self.rank_of(n, k), base, interpolative=base is None)


@dataclass(frozen=True)
class StoredFactors:
    """A factorised layer as the checkpoint holds it.

    Args:
        format: of the layer.
        factors: in the dtype they are stored in.
        codes: what they correct, None where they stand alone.
    """

    format: LowRankFormat
    factors: Factors
    codes: Codes | None

    def dequantize(self) -> torch.Tensor:
        """The weight it stands for, [N, K] fp32."""
        product = self.factors.product()
        return product if self.codes is None else self.codes.dequantize() + product

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is written, by name inside the layer."""
        from taut_kernels.for_deploy import layer_description as told

        base, order = self.format.base, self.factors.order
        packed = {} if base is None or self.codes is None else base.pack(self.codes)
        ordered = {} if order is None else {told.ORDER: order}
        return {**packed, **ordered, "weight_u": self.factors.up, "weight_v": self.factors.down}

    def reads_back(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether written tensors stand for this weight."""
        from taut_kernels.for_deploy import layer_description as told

        up, down, order = tensors["weight_u"], tensors["weight_v"], tensors.get(told.ORDER)
        product = Factors(up, down, order).product()
        base = self.format.base
        read = product if base is None else base.unpack(tensors).dequantize() + product
        return torch.equal(read, self.dequantize())

    def round_input(self, x: torch.Tensor) -> torch.Tensor:
        """The input as it is."""
        return x


def of_layer(stage: Factorize, found: LowRankFormat, name: str) -> LowRankFormat:
    """The format of one layer, whose rank may have been decided by itself.

    Args:
        stage: of the recipe.
        found: of :func:`low_rank_format`.
        name: full name of the layer.
    """
    rank = stage.rank_of(name)
    return found if rank is None else found.of_rank(rank)


def low_rank_format(
    stage: Factorize, input_sizes: Collection[int], dtype: torch.dtype
) -> LowRankFormat:
    """The format a stage asks for, as :func:`.registry.weight_format` chooses it.

    Raises:
        RecipeError: no allowed group size of the residual divides every K.
    """
    residual = stage.residual
    if residual is None:
        return LowRankFormat(stage.rank, stage.rank_budget, None, dtype)
    quantize = Quantize(
        scheme=residual.scheme, group_size=residual.group_size, symmetric=residual.symmetric
    )
    base = weight_format(quantize, input_sizes, dtype)
    return LowRankFormat(residual.rank, None, base, dtype)
