"""Rounding that a gradient passes through: what a stored weight stands for, of its master weight.

Maths     q = clamp(round(w / s + z), low, high), value = (q - z) · s; float8: q = cast(clamp(…))
Gradient  straight through where w / s + z rounds to a code by itself, 0 where it is clamped; of a
          scale: the sum over its weights of g · (q - z - w / s) inside and g · (q - z) outside
Shapes    w [N, K] fp32; s and z [1], [N, 1], [N, G] or [N / b, K / c]: K / G (or c) weights in a
          row, and b rows, share one entry
Source    straight-through estimator: Bengio et al., arXiv:1308.3432, §2.3; gradient of the scale:
          LSQ, arXiv:1902.08153, §2.1
"""

from dataclasses import dataclass
from typing import Any, cast

import torch

from taut_deploy.compress.quantize.float8 import FP8_MAX, round_fp8
from taut_deploy.compress.quantize.scales import expand


@dataclass(frozen=True)
class Grid:
    """The values a stored weight can take.

    Args:
        kind: ``int`` or ``float8`` (e4m3).
        low: smallest code.
        high: largest code.
    """

    kind: str
    low: float
    high: float

    @classmethod
    def of_integers(cls, num_bits: int) -> "Grid":
        """Signed integers of so many bits."""
        return cls("int", -float(1 << (num_bits - 1)), float((1 << (num_bits - 1)) - 1))

    @classmethod
    def of_float8(cls) -> "Grid":
        """Numbers of ``torch.float8_e4m3fn``."""
        return cls("float8", -FP8_MAX, FP8_MAX)

    def holds(self, places: torch.Tensor) -> torch.Tensor:
        """Which values are not clamped, bool."""
        # Half a step further for integers: what rounds to the last code can still come back.
        slack = 0.5 if self.kind == "int" else 0.0
        return (places >= self.low - slack) & (places <= self.high + slack)

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """The nearest code of each value, fp32."""
        if self.kind == "float8":
            return round_fp8(values)
        return values.clamp(self.low, self.high).round_()


def collapse(values: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """Sum [N, K] over the weights that share an entry: the transpose of :func:`expand`."""
    if entries.numel() == 1:
        return values.sum().reshape(entries.shape)
    (n, k), (rows, columns) = values.shape, entries.shape
    if n % rows == 0 and k % columns == 0:
        return values.view(rows, n // rows, columns, k // columns).sum((1, 3))
    # The last block is cut: filled up, it is as large as the others.
    height, width = -(-n // rows), -(-k // columns)
    padded = torch.nn.functional.pad(values, (0, columns * width - k, 0, rows * height - n))
    return padded.view(rows, height, columns, width).sum((1, 3))


class _FakeQuantize(torch.autograd.Function):
    """Keeps the master weight alone between the passes; the rest is computed again."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, grid: Grid
    ) -> torch.Tensor:
        """Return the values [N, K] fp32."""
        ctx.save_for_backward(weight, scale, *(() if zero is None else (zero,)))
        ctx.grid = grid
        codes, spread, shift, _ = _codes(weight, scale, zero, grid)
        return codes.sub_(shift).mul_(spread)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of the weight and the scale."""
        weight, scale, *rest = ctx.saved_tensors
        codes, _, shift, places = _codes(weight, scale, rest[0] if rest else None, ctx.grid)
        inside = ctx.grid.holds(places)
        gradient = gradients[0]
        of_scale = None
        if ctx.needs_input_grad[1]:
            steps = codes.sub_(shift).sub_((places - shift) * inside)
            of_scale = collapse(steps.mul_(gradient), scale)
        return gradient * inside, of_scale, None, None


def _codes(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, expanded scale, expanded zero point, and the places before rounding."""
    spread = expand(scale, weight.shape)
    shift = weight.new_zeros(1, 1) if zero is None else expand(zero.float(), weight.shape)
    places = weight / spread + shift
    return grid.round(places), spread, shift, places


def fake_quantize(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, grid: Grid
) -> torch.Tensor:
    """What the stored weight stands for, differentiable in the weight and the scale.

    Args:
        weight: [N, K] fp32 master weight.
        scale: fp32, one of the shapes above.
        zero: integers of the scale's shape, or None.
        grid: the codes.

    Returns:
        [N, K] fp32.
    """
    value = _FakeQuantize.apply(weight, scale, zero, grid)  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", value)


def codes_of(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, grid: Grid
) -> torch.Tensor:
    """The codes [N, K] fp32 that are stored for a master weight."""
    return _codes(weight, scale, zero, grid)[0]


def nearest_in_cell(
    wanted: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    margin: float = 0.49,
) -> torch.Tensor:
    """The weights nearest to ``wanted`` that still round to ``codes``.

    Args:
        wanted: [N, K] fp32.
        codes: [N, K] fp32.
        scale: one of the shapes above.
        zero: of the scale's shape, or None.
        margin: half the width of a cell, in steps.

    Returns:
        [N, K] fp32.
    """
    spread = expand(scale.float(), wanted.shape)
    shift = 0.0 if zero is None else expand(zero.float(), wanted.shape)
    places = wanted / spread + shift
    return (torch.minimum(torch.maximum(places, codes - margin), codes + margin) - shift) * spread
