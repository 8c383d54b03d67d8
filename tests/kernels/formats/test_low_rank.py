"""The low-rank product of one layer and of layers that share their input."""

from __future__ import annotations

import torch

from taut_kernels.formats.low_rank import low_rank_linear


def test_parts_of_other_ranks_are_each_multiplied_by_their_own_factors() -> None:
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator).double()

    x, ranks, rows = whole(2, 3, 8), (3, 1, 2), (6, 4, 2)
    down, ups = whole(6, 8), [whole(n, r) for n, r in zip(rows, ranks, strict=True)]
    dense = torch.cat([ups[0] @ down[:3], ups[1] @ down[3:4], ups[2] @ down[4:]])
    assert torch.equal(low_rank_linear(x, down, ups), x @ dense.T)
    assert torch.equal(low_rank_linear(x, down[:3], ups[:1]), x @ dense[:6].T)
