"""FP8 (e4m3) grids: one scale for each output channel.

Source: FP8 Formats for Deep Learning, arXiv:2209.05433, §3; e4m3 has no infinity and ends at 448.
Scales are rounded to the dtype they are stored in *before* codes are chosen.
"""

from dataclasses import dataclass

import torch

from taut_deploy.compress.quantize.protocol import ColumnRounding

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
_LEAST_NORMAL = torch.finfo(FP8).tiny
_EXPONENT = 0x7F800000
_DROPS_ALL_BUT_THREE_BITS = 1.5 * 2.0**20


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 numbers; what is beyond the range becomes its end."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def round_fp8(values: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 numbers, as :func:`to_fp8` finds them, without leaving fp32.

    torch widens fp8 numbers one at a time on a CPU, which took most of the time of rounding.

    Args:
        values: any shape, fp32; NaN stays NaN.

    Returns:
        The same shape, fp32.
    """
    values = values.clamp(-FP8_MAX, FP8_MAX)
    power = (values.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=_LEAST_NORMAL)
    # The sum has no room below the third bit of the value's fraction: fp32 rounds there, ties to
    # even; below the least normal number the step stays the same.
    power.mul_(_DROPS_ALL_BUT_THREE_BITS)
    return values.add_(power).sub_(power)


def fake_quantize_tokens_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round activations as an FP8 engine does: one scale per token, from that token.

    Args:
        x: [..., K] any float dtype.

    Returns:
        Same shape and dtype as ``x``, on the grid.
    """
    values = x.float()
    scale = values.abs().amax(-1, keepdim=True).clamp_(min=1e-10) / FP8_MAX
    return round_fp8(values / scale).mul_(scale).to(x.dtype)


@dataclass(frozen=True)
class Float8Weight:
    """FP8 numbers with their scales.

    Args:
        codes: [N, K] float8_e4m3fn.
        scale: [N, 1].
    """

    codes: torch.Tensor
    scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """The weights these codes stand for, [N, K] fp32."""
        return self.codes.float() * self.scale.float()


@dataclass(frozen=True)
class Float8Grid:
    """A weight's FP8 grid, fixed: values are rounded onto it.

    Args:
        scale: [N, 1].
    """

    scale: torch.Tensor

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """The nearest values on the grid, [N, K] fp32."""
        scale = self.scale.float()
        return round_fp8(values / scale).mul_(scale)

    def encode(self, values: torch.Tensor) -> Float8Weight:
        """The nearest codes of values [N, K]; exact for values that are on the grid already."""
        return Float8Weight(to_fp8(values / self.scale.float()), self.scale)

    def by_column(self, order: torch.Tensor) -> ColumnRounding:
        """Rounding of one input channel at a time."""
        del order  # every channel has the same scales
        scale = self.scale.float()[:, 0]
        return lambda _position, values: round_fp8(values / scale).mul_(scale)


@dataclass(frozen=True)
class Float8Spec:
    """Shape of an FP8 grid.

    Args:
        scale_dtype: dtype the scales are stored in.
    """

    scale_dtype: torch.dtype

    def fit(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> Float8Grid:
        """The grid whose ends are each channel's absmax.

        A float's steps shrink with its magnitude, so a smaller range would buy next to nothing:
        ``importance`` is not used.
        """
        del importance
        scale = (weight.abs().amax(1, keepdim=True) / FP8_MAX).to(self.scale_dtype)
        # A channel of zeros gets scale 1: its codes are zero either way.
        positive = scale.float() > torch.finfo(torch.float32).tiny
        return Float8Grid(torch.where(positive, scale, torch.ones_like(scale)))
