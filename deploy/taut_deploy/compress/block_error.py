"""How far a block's output is from the wanted one, as a function of what makes its weights."""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.func import functional_call

# Runs a block on a batch of inputs [B, T, H].
Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class BlockError:
    """A block some of whose weights are computed from parameters.

    Args:
        block: unchanged; its other weights stay as they are in it.
        weights: of layers, by their names in the block: modules without input that give [N, K].
        call: runs the block.
    """

    def __init__(self, block: nn.Module, weights: Mapping[str, nn.Module], call: Call) -> None:
        self._weights = weights
        self._call = _Called(block, call)
        self._dtypes = {name: block.get_submodule(name).weight.dtype for name in weights}

    def of(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean squared error of the block's output, differentiable in the parameters.

        Args:
            hidden: [B, T, H] inputs.
            target: [B, T, H] outputs wanted for them.
        """
        weights = {
            f"block.{name}.weight": layer().to(self._dtypes[name])
            for name, layer in self._weights.items()
        }
        got: torch.Tensor = functional_call(self._call, weights, (hidden,))
        return (got.float() - target.float()).square().mean()

    @torch.no_grad()
    def judge(self, hidden: torch.Tensor, target: torch.Tensor) -> float:
        """The error alone.

        Raises:
            ValueError: it is not finite.
        """
        value = float(self.of(hidden, target))
        if value != value or value == float("inf"):
            raise ValueError("the block's output is not finite while its weights are learned")
        return value


class _Called(nn.Module):
    def __init__(self, block: nn.Module, call: Call) -> None:
        super().__init__()
        self.block = block
        self._function = call

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._function(self.block, hidden)


def judging_sequences(sequences: int) -> int:
    """How many of the first sequences judge and are never learned from: a sixteenth, 1 at least.

    Raises:
        ValueError: there are fewer than two.
    """
    if sequences < 2:
        raise ValueError("learning a block's weights needs at least 2 calibration sequences")
    return max(1, sequences // 16)
