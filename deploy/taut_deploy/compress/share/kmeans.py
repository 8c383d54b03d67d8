"""Weighted k-means of single values: the books of many blocks of rows at once.

Source: Lloyd, "Least squares quantization in PCM", 1982. Values in order make a cluster a range,
whose sums are differences of two running sums: a step costs one search per border.
"""

import torch

_STEPS = 25
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the quantiles of the mass in a start, the rest evenly spaced. Quantiles alone starve the
tails, even spacing the middle; Lloyd's method stops at the nearest optimum, not the least."""


def weighted_kmeans(values: torch.Tensor, costs: torch.Tensor, entries: int) -> torch.Tensor:
    """The entries that lose least of each row's values, the best of several starts.

    Args:
        values: [B, V] fp32.
        costs: [B, V] fp32, of a unit's square of error; not negative.
        entries: of a book.

    Returns:
        [B, entries] fp32, rising.
    """
    ordered, index = values.sort(1)
    clusters = _Clusters(ordered, costs.gather(1, index))
    books = _starts(ordered, clusters.mass, entries)
    for _ in range(_STEPS):
        sums, weights = clusters.of(books)
        books = torch.where(weights > 0, sums / weights.clamp(min=1e-30), books).sort(-1).values
    sums, weights = clusters.of(books)
    gain = (2 * sums * books - weights * books.square()).sum(-1)
    best = gain.argmax(1)[:, None, None].expand(-1, 1, entries)
    return books.gather(1, best)[:, 0].float()


def _starts(ordered: torch.Tensor, mass: torch.Tensor, entries: int) -> torch.Tensor:
    """Where the search begins, [B, S, entries] fp64."""
    count = ordered.shape[1]
    places = (torch.arange(entries, device=ordered.device, dtype=torch.float64) + 0.5) / entries
    wanted = torch.searchsorted(mass, places * mass[:, -1:]).clamp(1, count) - 1
    by_mass = ordered.gather(1, wanted).double()
    low, high = ordered[:, :1], ordered[:, -1:]
    even = low + places * (high - low)
    return torch.stack([share * by_mass + (1 - share) * even for share in _SHARES], 1)


class _Clusters:
    """Sums over ranges of values in order.

    Args:
        ordered: [B, V] fp32, rising.
        costs: [B, V] of each.
    """

    def __init__(self, ordered: torch.Tensor, costs: torch.Tensor) -> None:
        self._ordered = ordered
        self.mass = _running(costs.double())
        self._moment = _running(costs.double() * ordered)

    def of(self, books: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cost times value and cost, summed over the values nearest to each entry.

        Args:
            books: [B, S, entries], rising.

        Returns:
            Two of [B, S, entries] fp64.
        """
        blocks, starts, entries = books.shape
        borders = ((books[..., 1:] + books[..., :-1]) / 2).to(self._ordered.dtype)
        inner = torch.searchsorted(self._ordered, borders.flatten(1)).view(blocks, starts, -1)
        first = inner.new_zeros(blocks, starts, 1)
        edges = torch.cat([first, inner, first + self._ordered.shape[1]], -1).flatten(1)
        shape = (blocks, starts, entries + 1)
        return (
            self._moment.gather(1, edges).view(shape).diff(dim=-1),
            self.mass.gather(1, edges).view(shape).diff(dim=-1),
        )


def _running(terms: torch.Tensor) -> torch.Tensor:
    """Sums of the first 0 to V terms of each row, [B, V + 1]."""
    return torch.cat([terms.new_zeros(len(terms), 1), terms.cumsum(1)], 1)
