"""FP8 (e4m3) grids: a scale for each output channel, each square block of weights, or the whole.

Source: FP8 Formats for Deep Learning, arXiv:2209.05433, §3; e4m3 has no infinity and ends at 448.
Scales are rounded to the dtype they are stored in *before* codes are chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from taut_deploy.compress.quantize.protocol import ColumnRounding
from taut_deploy.compress.quantize.scales import expand, row_slices
from taut_deploy.compress.quantize.small_float import round_small_float

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
_LEAST_NORMAL = torch.finfo(FP8).tiny
_FRACTION_BITS = 3


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 numbers; what is beyond the range becomes its end."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def from_fp8(codes: torch.Tensor) -> torch.Tensor:
    """What e4m3 numbers that are none of its two NaN stand for, fp32.

    torch widens one at a time on a CPU. Their bits are those of fp16 with three places less of the
    exponent, whose bias is 8 larger.
    """
    half = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)  # sign, sign, the rest
    return half.bitwise_and_(~0x4000).view(torch.float16).float().mul_(2.0**8)


def round_fp8(values: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 numbers of fp32 values, as :func:`to_fp8` finds them, in fp32."""
    return round_small_float(
        values, fraction_bits=_FRACTION_BITS, least_normal=_LEAST_NORMAL, largest=FP8_MAX
    )


def fake_quantize_tokens_fp8(x: torch.Tensor, group_size: int | None = None) -> torch.Tensor:
    """Round activations as an FP8 engine does: scales are of a token, taken from that token.

    Args:
        x: [..., K] any float dtype.
        group_size: channels a scale covers; None for one scale per token.

    Returns:
        Same shape and dtype as ``x``, on the grid.
    """
    values = x.float()
    if group_size is not None:
        values = values.view(*x.shape[:-1], -1, group_size)
    scale = values.abs().amax(-1, keepdim=True).clamp_(min=1e-10) / FP8_MAX
    return round_fp8(values / scale).mul_(scale).view(x.shape).to(x.dtype)


@dataclass(frozen=True)
class Float8Weight:
    """FP8 numbers with their scales.

    Args:
        codes: [N, K] float8_e4m3fn.
        scale: [N, 1], [N / B, K / B] for blocks of B×B weights, or [1, 1].
    """

    codes: torch.Tensor
    scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """The weights these codes stand for, [N, K] fp32."""
        found = torch.empty(self.codes.shape, device=self.codes.device)
        scale = expand(self.scale.float(), self.codes.shape).expand(len(found), -1)
        for rows in row_slices(found):
            found[rows] = from_fp8(self.codes[rows]).mul_(scale[rows])
        return found


@dataclass(frozen=True)
class Float8Grid:
    """A weight's FP8 grid, fixed: values are rounded onto it.

    Args:
        scale: [N, 1], [N / B, K / B] or [1, 1].
    """

    scale: torch.Tensor

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """The nearest values on the grid, [N, K] fp32."""
        scale = expand(self.scale.float(), values.shape)
        return round_fp8(values / scale).mul_(scale)

    def encode(self, values: torch.Tensor) -> Float8Weight:
        """The nearest codes of values [N, K]; exact for values that are on the grid already."""
        scale = expand(self.scale.float(), values.shape).expand(len(values), -1)
        codes = torch.empty(values.shape, dtype=FP8, device=values.device)
        for rows in row_slices(values):
            codes[rows] = to_fp8(values[rows] / scale[rows])
        return Float8Weight(codes, self.scale)

    def by_column(self, order: torch.Tensor) -> ColumnRounding:
        """Rounding of one input channel at a time."""
        width = order.shape[0] // self.scale.shape[1]
        block_of = (order // width).tolist()
        scales = self.scale.float().T.contiguous()

        def rounded(position: int, values: torch.Tensor) -> torch.Tensor:
            scale = scales[block_of[position]]
            scale = scale.repeat_interleave(values.shape[0] // scale.shape[0])
            return round_fp8(values / scale).mul_(scale)

        return rounded


@dataclass(frozen=True)
class Float8Spec:
    """Shape of an FP8 grid.

    Args:
        scale_dtype: dtype the scales are stored in.
        block: side of the square of weights that share a scale, a divisor of N and K; None for one
            scale per output channel.
    """

    scale_dtype: torch.dtype
    block: int | None = None

    def fit(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> Float8Grid:
        """The grid whose ends are the absmax of what shares a scale.

        A float's steps shrink with its magnitude, so a smaller range would buy next to nothing:
        ``importance`` is not used.
        """
        del importance
        scale = (self._absmax(weight) / FP8_MAX).to(self.scale_dtype)
        # Where all is zero the scale is 1: codes are zero either way.
        positive = scale.float() > torch.finfo(torch.float32).tiny
        return Float8Grid(torch.where(positive, scale, torch.ones_like(scale)))

    def _absmax(self, weight: torch.Tensor) -> torch.Tensor:
        """Of each channel or block of a weight [N, K], fp32, in the shape of the scales."""
        if self.block is None:
            parts = [torch.aminmax(weight[rows], dim=1) for rows in row_slices(weight)]
            return torch.cat([torch.maximum(-one.min, one.max) for one in parts])[:, None].float()
        rows, columns = (size // self.block for size in weight.shape)
        return weight.view(rows, self.block, columns, self.block).abs().amax((1, 3)).float()

    def coded(
        self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
    ) -> Float8Weight:
        """The weight of codes [N, K] fp32 and scales; floats have no zero points."""
        del zero
        return Float8Weight(to_fp8(codes), scale)

    @property
    def steps_at_end(self) -> int:
        """The largest code over how far it is from the next one."""
        return 14  # 1.75 · 2⁸ over 2⁸⁻³

    def nearest(self, places: torch.Tensor) -> torch.Tensor:
        """The nearest codes of values in their units, fp32."""
        return round_fp8(places)

    def step_at(self, codes: torch.Tensor) -> torch.Tensor:
        """How far a code [N, K] fp32 is from the next larger one in magnitude."""
        power = torch.frexp(codes.abs().clamp(min=_LEAST_NORMAL)).exponent - 1
        return torch.ldexp(torch.ones_like(codes), power - _FRACTION_BITS)


@dataclass(frozen=True)
class Float8TensorSpec(Float8Spec):
    """Shape of an FP8 grid with one scale for a whole weight.

    Args:
        largest: magnitude that the scale has to suit; None for the weight's own.
    """

    largest: float | None = None

    def joined(self, weights: Sequence[torch.Tensor]) -> "Float8TensorSpec":
        """The shape for layers that an engine joins into one, which has one scale."""
        return replace(self, largest=max(float(weight.abs().max()) for weight in weights))

    def _absmax(self, weight: torch.Tensor) -> torch.Tensor:
        largest = float(weight.abs().max()) if self.largest is None else self.largest
        return torch.full((1, 1), largest, device=weight.device)
