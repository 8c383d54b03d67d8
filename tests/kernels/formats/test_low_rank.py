"""The low-rank product of one layer and of layers that share their input."""

from __future__ import annotations

import torch

from taut_kernels.formats.low_rank import dense_rows, low_rank_linear


def test_parts_of_other_ranks_are_each_multiplied_by_their_own_factors() -> None:
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator).double()

    x, ranks, rows = whole(2, 3, 8), (3, 1, 2), (6, 4, 2)
    down, ups = whole(6, 8), [whole(n, r) for n, r in zip(rows, ranks, strict=True)]
    dense = torch.cat([ups[0] @ down[:3], ups[1] @ down[3:4], ups[2] @ down[4:]])
    assert torch.equal(low_rank_linear(x, down, ups), x @ dense.T)
    assert torch.equal(low_rank_linear(x, down[:3], ups[:1]), x @ dense[:6].T)


def test_outputs_that_are_the_inner_ones_come_in_their_order() -> None:
    generator = torch.Generator().manual_seed(1)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator).double()

    x, down, ups = whole(2, 3, 8), whole(5, 8), [whole(3, 3), whole(4, 2)]
    orders = [torch.randperm(6, generator=generator).int(), None]
    every = [*down[:3], *(ups[0] @ down[:3])]
    first = torch.stack([every[place] for place in orders[0].tolist()])  # type: ignore[union-attr]
    dense = torch.cat([first, ups[1] @ down[3:]])
    assert torch.equal(low_rank_linear(x, down, ups, orders), x @ dense.T)
    downs = [down[:3], down[3:]]
    for rows in (slice(0, 10), slice(4, 8), slice(7, 9)):
        assert torch.equal(dense_rows(downs, ups, rows, orders).double(), dense[rows])
