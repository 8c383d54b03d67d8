"""Learned indices: which entry of its book a weight takes is decided by the block's output.

Source: AutoRound, arXiv:2309.05516, §3, with the entries of a book as the grid; see
:mod:`taut_deploy.compress.quantize.rounding`.
"""

from collections.abc import Mapping

import torch

from taut_deploy.compress.quantize.learned import learn_in_block
from taut_deploy.compress.quantize.rounding import start_at
from taut_deploy.compress.share.codebook import CodebookWeight
from taut_deploy.compress.state import BlockState


class BookSpec:
    """The entries of a layer's books as codes to round to.

    Args:
        book: [B, entries] rising, in the stored dtype; row ``n`` uses book ``n * B // N``.
    """

    def __init__(self, book: torch.Tensor) -> None:
        self._book = book
        self._values = book.float()
        self._borders = ((self._values[:, 1:] + self._values[:, :-1]) / 2).contiguous()

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype the scales are stored in, that of the books."""
        return self._book.dtype

    @property
    def steps_at_end(self) -> int:
        """Entries from the middle of a book to its end."""
        return self._book.shape[1] // 2

    def indices(self, places: torch.Tensor) -> torch.Tensor:
        """The nearest entry of each value [N, K], int64."""
        by_book = places.reshape(len(self._book), -1).contiguous()
        return torch.searchsorted(self._borders, by_book).view(places.shape)

    def values_of(self, indices: torch.Tensor) -> torch.Tensor:
        """The entries of indices [N, K], fp32."""
        return self._at(self._values, indices.long())

    def nearest(self, places: torch.Tensor) -> torch.Tensor:
        """The nearest values in the books, [N, K] fp32."""
        return self.values_of(self.indices(places))

    def step_at(self, codes: torch.Tensor) -> torch.Tensor:
        """The mean distance of an entry to its neighbours, at entries [N, K]."""
        gaps = self._values.diff(dim=1)
        gaps = torch.cat([gaps[:, :1], gaps, gaps[:, -1:]], 1)
        return self._at((gaps[:, 1:] + gaps[:, :-1]) / 2, self.indices(codes))

    def coded(
        self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
    ) -> CodebookWeight:
        """The weight of entries [N, K] fp32 and scales; books have no zero points."""
        del zero
        return CodebookWeight(self.indices(codes).to(torch.uint8), self._book, scale)

    def _at(self, table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return table.gather(1, indices.view(len(table), -1)).view(indices.shape)


def learn_indices(
    state: BlockState, coded: Mapping[str, CodebookWeight], steps: int
) -> dict[str, CodebookWeight]:
    """Tune indices and scales of a block's layers together; the books stay.

    Args:
        state: of the block.
        coded: where each layer begins, books rising, by its name in the block.
        steps: of the search.

    Raises:
        ModelError: the block's output is not finite.
    """
    starts = {}
    for name, one in coded.items():
        spec = BookSpec(one.book)
        values = spec.values_of(one.codes)
        starts[name] = start_at(state.layers[name].sound_weight(), values, one.scale, spec)
    learned = learn_in_block(state, starts, steps)
    return {name: one for name, one in learned.items() if isinstance(one, CodebookWeight)}
