"""Block-wise reconstruction: what is left of a block's weights moves until its output is right.

Source: "A Free Lunch in LLM Compression: Revisiting Retraining after Pruning", arXiv:2510.14444:
after pruning, fitting a block's remaining weights to the dense block's output makes up for more
than retraining the whole model, in the memory of one block. Here the wanted output is that of the
original model's own stream, so that errors of earlier blocks are made up for too; and what is
fitted may be anything a weight is made of: kept weights, factors, the values of a book.
"""

from collections.abc import Mapping

import torch
from torch import nn

from taut_deploy.compress.block_error import BlockError, judging_sequences
from taut_deploy.compress.lowrank.whitened_svd import product_of
from taut_deploy.compress.state import BlockState
from taut_deploy.errors import ModelError

_BATCH = 8
"""Sequences in a step."""
_RATE = 5e-3
"""First step of Adam, over the root mean square of what it moves."""
_JUDGED = 20
"""Times that the error on the judging sequences is taken."""


class Kept(nn.Module):
    """A pruned weight: what was kept is fitted, the rest stays zero.

    Args:
        weight: [N, K] fp32, zero where pruned.
        mask: [N, K] bool, True where kept.
    """

    def __init__(self, weight: torch.Tensor, mask: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.mask = mask

    def forward(self) -> torch.Tensor:
        """The weight, [N, K]."""
        return self.weight * self.mask


class Product(nn.Module):
    """A weight of two factors, both fitted, alone or added to what they correct.

    Args:
        up: [N, r] fp32, or [N - r, r] with an order.
        down: [r, K] fp32.
        order: [N] int32 of the interpolative form, which stays.
        base: [N, K] fp32, which stays; None where there is none.
    """

    def __init__(
        self,
        up: torch.Tensor,
        down: torch.Tensor,
        order: torch.Tensor | None = None,
        base: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.order, self.base = order, base
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())

    def forward(self) -> torch.Tensor:
        """The weight, [N, K]."""
        product = product_of(self.up, self.down, self.order)
        return product if self.base is None else self.base + product


class Indexed(nn.Module):
    """A weight of indices into books, times scales: values and scales are fitted.

    Args:
        codes: [N, K] uint8.
        book: [B, entries] fp32; row ``n`` uses book ``n * B // N``.
        scale: [N, G] fp32.
    """

    def __init__(self, codes: torch.Tensor, book: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self.codes = codes.long()
        self.book, self.scale = nn.Parameter(book.clone()), nn.Parameter(scale.clone())

    def forward(self) -> torch.Tensor:
        """The weight, [N, K]."""
        n, k = self.codes.shape
        rows = self.book.repeat_interleave(n // self.book.shape[0], 0)
        values = rows.gather(1, self.codes).view(n, self.scale.shape[1], -1)
        return (values * self.scale[..., None]).view(n, k)


def reconstruct(
    state: BlockState, weights: Mapping[str, nn.Module], steps: int, *, seed: int = 0
) -> None:
    """Fit what weights are made of to the output of the original model's block, in place.

    Args:
        state: of the block; its module is not changed but for its dtype.
        weights: of layers, by their names in the block.
        steps: of Adam, whose step falls to 0 as a cosine does.
        seed: order of the sequences.

    Raises:
        ModelError: the block's output is not finite.
    """
    if state.example is None:
        raise TypeError(f"{state.name}: the recipe said that it needs no target")
    # Earlier stages may have left some weights in fp32; the block is called from here on.
    state.module.to(state.example.inputs.dtype)
    error = BlockError(state.module, weights, state.example.call)
    try:
        _descend(error, weights, state.example.inputs, state.example.targets, steps, seed)
    except ValueError as failure:
        raise ModelError(f"{state.name}: {failure}") from failure


def _descend(
    error: BlockError,
    weights: Mapping[str, nn.Module],
    hidden: torch.Tensor,
    target: torch.Tensor,
    steps: int,
    seed: int,
) -> None:
    judges = judging_sequences(len(hidden))
    parameters = [one for weight in weights.values() for one in weight.parameters()]
    optimizer = torch.optim.Adam(
        [{"params": [one], "lr": _RATE * float(one.detach().square().mean().sqrt())}
         for one in parameters],
        betas=(0.9, 0.95),
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    best_error = error.judge(hidden[:judges], target[:judges])
    best = [one.detach().clone() for one in parameters]
    for step in range(steps):
        picked = judges + torch.randperm(len(hidden) - judges, generator=generator)[:_BATCH]
        with torch.enable_grad():
            optimizer.zero_grad()
            error.of(hidden[picked], target[picked]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, steps // _JUDGED) == 0:
            found = error.judge(hidden[:judges], target[:judges])
            if found < best_error:
                best_error, best = found, [one.detach().clone() for one in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, best, strict=True):
            parameter.copy_(value)
