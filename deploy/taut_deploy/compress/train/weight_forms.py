"""From an fp32 master weight to the tensor that is stored and served: one parametrisation each.

The model computes with what a form returns, in the type it is served in, so what trains and what
serves are the same arithmetic; the gradient arrives at the master weight straight through every
rounding. Used with :mod:`torch.nn.utils.parametrize`.
"""

import torch
from torch import nn

from taut_deploy.compress.lowrank.whitened_svd import Factors, product_of
from taut_deploy.compress.quantize.float8 import fake_quantize_tokens_fp8
from taut_deploy.compress.quantize.grid import fake_quantize_tokens
from taut_deploy.compress.train.fake_quantize import Grid, fake_quantize
from taut_deploy.compress.train.quantized_layers import QuantizedLayer


class Rounded(nn.Module):
    """A weight that is stored as it is, rounded to the type on disk; pruned places stay zero.

    Args:
        stored: type on disk.
        compute: type the model computes in.
        mask: bool of the weight's shape, or None.
    """

    mask: torch.Tensor | None

    def __init__(
        self, stored: torch.dtype, compute: torch.dtype, mask: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self._types = (stored, compute)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, master: torch.Tensor) -> torch.Tensor:
        """Return the weight the model computes with."""
        if self.mask is not None:
            master = master * self.mask
        return master.to(self._types[0]).to(self._types[1])


class Quantized(nn.Module):
    """A weight that is stored as codes; the scale can be learned, the zero point stays.

    A scale is trained as the logarithm of its ratio to where it began, so that one learning rate
    suits scales of any size and none can change its sign.

    Args:
        layer: as it was read.
        stored: type of the scales on disk.
        compute: type the model computes in.
        mask: bool [N, K], places that stay zero, or None.
    """

    first_scale: torch.Tensor
    zero: torch.Tensor | None
    mask: torch.Tensor | None

    def __init__(
        self,
        layer: QuantizedLayer,
        stored: torch.dtype,
        compute: torch.dtype,
        mask: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self._types = (stored, compute)
        self._grid: Grid = layer.grid
        self.log_ratio = nn.Parameter(torch.zeros_like(layer.scale))
        self.register_buffer("first_scale", layer.scale, persistent=False)
        self.register_buffer("zero", layer.zero, persistent=False)
        self.register_buffer("mask", mask, persistent=False)

    @property
    def scale(self) -> torch.Tensor:
        """The scale as it is stored, fp32, differentiable."""
        return (self.first_scale * self.log_ratio.exp()).to(self._types[0]).float()

    def forward(self, master: torch.Tensor) -> torch.Tensor:
        """Return the weight the model computes with."""
        if self.mask is not None:
            master = master * self.mask
        value = fake_quantize(master, self.scale, self.zero, self._grid)
        return value.to(self._types[0]).to(self._types[1])


class LowRank(nn.Module):
    """A weight that is stored as two thin ones; both are trained, the rank stays.

    Args:
        factors: as they were read, fp32.
        stored: type of the factors on disk.
        compute: type the model computes in.
    """

    order: torch.Tensor | None

    def __init__(self, factors: Factors, stored: torch.dtype, compute: torch.dtype) -> None:
        super().__init__()
        self._read = (factors.up, factors.down)
        self._types = (stored, compute)
        self.register_buffer("order", factors.order, persistent=False)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return the weight the model computes with, [N, K]."""
        stored, compute = self._types
        up, down = left.to(stored).float(), right.to(stored).float()
        return product_of(up, down, self.order).to(compute)

    def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors that were read: training begins where the file ends."""
        left, right = self._read
        return left.to(weight.device), right.to(weight.device)


class TokenRounding:
    """Forward pre-hook that rounds a layer's input as a W8A8 engine does, straight through.

    Args:
        kind: ``int`` (8 bits) or ``float8``, one scale per token from that token.
        scale: a fixed scale of the whole tensor instead, or None.
    """

    def __init__(self, kind: str, scale: torch.Tensor | None = None) -> None:
        self._kind = kind
        self._scale = scale

    def __call__(
        self, module: nn.Module, arguments: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor]:
        """Return the rounded input."""
        x = arguments[0]
        return (x + (self._rounded(x.detach()) - x.detach()),)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        integers = self._kind == "int"
        if self._scale is None:
            return fake_quantize_tokens(x) if integers else fake_quantize_tokens_fp8(x)
        grid = Grid.of_integers(8) if integers else Grid.of_float8()
        scale = self._scale.to(x.device)
        return (grid.round(x.float() / scale) * scale).to(x.dtype)
