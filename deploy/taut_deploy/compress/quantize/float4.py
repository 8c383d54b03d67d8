"""FP4 (e2m1) grids: groups of 16 with e4m3 scales, or of 32 with powers of two.

Maths     weight = code · scale / global scale, code in ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}
NVFP4     scale e4m3, one global scale a layer, here a power of two, which no reader rounds
MXFP4     scale a power of two (e8m0), no global scale
Source    OCP Microscaling Formats 1.0, §5.3, §6.3 (MXFP4); Pretraining LLMs with NVFP4,
          arXiv:2509.25149, §2 (NVFP4)
"""

import math
from dataclasses import dataclass, replace

import torch

from taut_deploy.compress.quantize.float8 import FP8, FP8_MAX, to_fp8
from taut_deploy.compress.quantize.protocol import ColumnRounding
from taut_deploy.compress.quantize.scales import expand
from taut_deploy.compress.quantize.small_float import round_small_float

FP4_MAX = 6.0
_EXPONENT_BIAS = 127
# Stored scales are tried so many places above and below the one that puts a group's largest weight
# at 6: there it lies on a lower number, or is cut. Eight places double a scale of e4m3.
_PLACES = range(-5, 9)
_PLACES_OF_POWERS = (0, -1)
_ROOM = 2.0
_LAST_E4M3 = 126


def round_fp4(values: torch.Tensor) -> torch.Tensor:
    """The nearest e2m1 numbers of fp32 values, in fp32; beyond the range its end."""
    return round_small_float(values, fraction_bits=1, least_normal=1.0, largest=FP4_MAX)


@dataclass(frozen=True)
class Float4Weight:
    """FP4 numbers with their scales.

    Args:
        halves: [N, K] int8, twice the numbers: every one is a whole number of halves.
        scale: [N, G] e4m3, or uint8 exponents of two, 127 standing for 0.
        global_scale: [1] fp32 that scales are divided by; None where there is none.
    """

    halves: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None

    def dequantize(self) -> torch.Tensor:
        """The weights these codes stand for, [N, K] fp32."""
        step = scale_values(self.scale, self.global_scale)
        return self.halves.float().mul_(0.5) * expand(step, self.halves.shape)


def scale_values(scale: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
    """What stored scales [N, G] stand for, fp32."""
    if scale.dtype == torch.uint8:
        # The bits of a power of two in fp32 are its exponent alone.
        return (scale.to(torch.int32) << 23).view(torch.float32)
    return scale.float() if global_scale is None else scale.float() / global_scale


@dataclass(frozen=True)
class Float4Grid:
    """A weight's FP4 grid, fixed: values are rounded onto it.

    Args:
        scale: as it is stored, [N, G].
        global_scale: as it is stored, [1], or None.
    """

    scale: torch.Tensor
    global_scale: torch.Tensor | None

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """The nearest values on the grid, [N, K] fp32."""
        return self.encode(values).dequantize()

    def encode(self, values: torch.Tensor) -> Float4Weight:
        """The nearest codes of values [N, K]; exact for values that are on the grid already."""
        step = expand(scale_values(self.scale, self.global_scale), values.shape)
        halves = round_fp4(values / step).mul_(2.0).to(torch.int8)
        return Float4Weight(halves, self.scale, self.global_scale)

    def by_column(self, order: torch.Tensor) -> ColumnRounding:
        """Rounding of one input channel at a time."""
        group_of = (order // (order.shape[0] // self.scale.shape[1])).tolist()
        steps = scale_values(self.scale, self.global_scale).T.contiguous()

        def rounded(position: int, values: torch.Tensor) -> torch.Tensor:
            step = steps[group_of[position]]
            return round_fp4(values / step).mul_(step)

        return rounded


@dataclass(frozen=True)
class Float4Spec:
    """Shape of an FP4 grid.

    Args:
        group_size: weights per scale along K.
        powers_of_two: scales are powers of two, and there is no global one.
        largest: magnitude that the global scale has to suit; None for the weight's own.
    """

    group_size: int
    powers_of_two: bool
    largest: float | None = None

    def joined(self, weights: list[torch.Tensor]) -> "Float4Spec":
        """The shape for layers that an engine joins into one, which has one global scale."""
        if self.powers_of_two:
            return self
        return replace(self, largest=max(float(weight.abs().max()) for weight in weights))

    def fit(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> Float4Grid:
        """The grid of least importance-weighted squared error, scale by scale.

        Args:
            weight: [N, K]; K must be a multiple of ``group_size``.
            importance: [K] fp32 non-negative weight of each input channel's error, or None.
        """
        n, k = weight.shape
        weight = weight.float()
        grouped = weight.view(n, -1, self.group_size)
        cost = torch.ones(k) if importance is None else importance
        cost = cost.to(weight).view(1, -1, self.group_size)
        global_scale = self._global_scale(weight)
        base = grouped.abs().amax(-1) / FP4_MAX
        best_error = torch.full_like(base, torch.inf)
        best = torch.zeros_like(base, dtype=torch.uint8 if self.powers_of_two else FP8)
        first = self._first_place(base, global_scale)
        last = 2 * _EXPONENT_BIAS if self.powers_of_two else _LAST_E4M3
        for place in _PLACES_OF_POWERS if self.powers_of_two else _PLACES:
            scale = (first + place).clamp_(1, last).to(torch.uint8).view(best.dtype)
            step = scale_values(scale, global_scale).unsqueeze(-1)
            rounded = round_fp4(grouped / step).mul_(step)
            error = rounded.sub_(grouped).square_().mul_(cost).sum(-1)
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            # torch selects no e4m3 on every device: their bits are selected instead.
            chosen = torch.where(better, scale.view(torch.uint8), best.view(torch.uint8))
            best = chosen.view(best.dtype)
        return Float4Grid(best, global_scale)

    def _global_scale(self, weight: torch.Tensor) -> torch.Tensor | None:
        if self.powers_of_two:
            return None
        largest = self.largest if self.largest is not None else float(weight.abs().max())
        # The largest scale that is tried has to fit into e4m3.
        tiny = torch.finfo(torch.float32).tiny
        room = FP8_MAX * FP4_MAX / (_ROOM * max(largest, tiny))
        exponent = min(max(math.floor(math.log2(room)), -_EXPONENT_BIAS + 1), _EXPONENT_BIAS - 1)
        return torch.tensor([2.0**exponent], device=weight.device)

    def _first_place(self, wanted: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
        """The bits, int32, of the stored scales [N, G] that stand for about ``wanted``."""
        if global_scale is None:
            tiny = torch.finfo(torch.float32).tiny
            return (wanted.clamp(min=tiny).log2().ceil() + _EXPONENT_BIAS).to(torch.int32)
        return to_fp8(wanted * global_scale).view(torch.uint8).to(torch.int32)
