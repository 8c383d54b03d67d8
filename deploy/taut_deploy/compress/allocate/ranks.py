"""The ranks a layer may have, and what each of them loses.

Source: the error of a rank is the sum of the dropped squares of the whitened singular values
(SVD-LLM, arXiv:2403.07378, §3.1), so that one decomposition gives it for every rank. That ranks
are shared out by such spectra follows SVD-LLM V2, arXiv:2503.12340, §3.1; here each layer's error
is weighed by what the layer costs the model (:mod:`taut_deploy.compress.mixed.scores`).
"""

from dataclasses import dataclass

import torch

from taut_deploy.compress.calibrate.observe import InputGroup
from taut_deploy.compress.formats.low_rank import LowRankFormat
from taut_deploy.compress.lowrank.whitened_svd import whiten
from taut_deploy.compress.mixed.scores import Tried
from taut_deploy.errors import ModelError


@dataclass(frozen=True)
class RankUnit:
    """One layer that is factorised.

    Args:
        layer: full name.
        ranks: that it may have, growing.
        reference: the one that equal shares give it.
        sizes: bytes of the layer at each rank.
        dampening_frac: of the stage.
    """

    layer: str
    ranks: tuple[int, ...]
    reference: int
    sizes: dict[int, int]
    dampening_frac: float

    @property
    def layers(self) -> tuple[str, ...]:
        """The one layer."""
        return (self.layer,)

    def try_layer(self, name: str, weight: torch.Tensor, inputs: InputGroup) -> Tried:
        """The error of each rank, by the spectrum.

        Raises:
            ModelError: calibration overflowed; names the layer.
        """
        if inputs.hessian is None:
            raise TypeError(f"{name}: ranks are scored by a Hessian")
        try:
            spectrum = whiten(weight, inputs.hessian, dampening_frac=self.dampening_frac)
        except ValueError as error:
            raise ModelError(f"{name}: {error}") from error
        squares = spectrum.values.double().square()
        dropped = torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)]).tolist()
        errors = {rank: float(dropped[rank]) for rank in self.ranks}
        return Tried(errors, spectrum.truncate(self.reference).product())


def rank_unit(
    name: str, shape: tuple[int, int], equal: LowRankFormat, dampening_frac: float
) -> RankUnit:
    """What a layer may become.

    Args:
        name: full name.
        shape: [N, K].
        equal: its format where every layer keeps the same share.
        dampening_frac: of the stage.
    """
    reference = equal.rank_of(*shape)
    # Predictions are made at the reference: far below it they would not hold.
    ranks = sorted({reference, *(one for one in equal.ranks(*shape) if one >= reference // 2)})
    sizes = {rank: equal.of_rank(rank).stored_bytes(*shape) for rank in ranks}
    return RankUnit(name, tuple(ranks), reference, sizes, dampening_frac)
