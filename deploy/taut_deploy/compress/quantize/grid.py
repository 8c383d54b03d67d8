"""Integer grids: from weights to scales and zero points, and from values to codes.

Codes are signed: ``q`` in ``[-2**(b-1), 2**(b-1) - 1]``; a weight is ``(q - zero) * scale``. Scales
are rounded to the dtype they are stored in *before* codes are chosen, so that what is judged is
what is loaded.
"""

from dataclasses import dataclass

import torch

from taut_deploy.compress.quantize.protocol import ColumnRounding
from taut_deploy.compress.quantize.scales import row_slices

# Candidate shrink factors of a group's range; 1.0 keeps absmax/minmax. With 8 bits the range's ends
# are worth more than a finer step, so nothing is searched there.
_SHRINK_FACTORS = tuple(1.0 - 0.0125 * step for step in range(33))


@dataclass(frozen=True)
class GridSpec:
    """Shape of an integer grid.

    Args:
        num_bits: 2 to 8.
        group_size: weights per scale along K, or None for one scale per output channel.
        symmetric: False adds an integer zero point per group.
        scale_dtype: dtype the scales are stored in.
        signed_scales: whether a symmetric group's scale may be negative: there is one code more
            below zero than above, and the group's far end gets it.
    """

    num_bits: int
    group_size: int | None
    symmetric: bool
    scale_dtype: torch.dtype
    signed_scales: bool = False

    def fit(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> "IntegerGrid":
        """The grid of least importance-weighted error; see :func:`fit_grid`."""
        scale, zero = fit_grid(weight, self, importance)
        return IntegerGrid(self, scale, zero)

    def nearest(self, places: torch.Tensor) -> torch.Tensor:
        """The nearest codes of values in their units, fp32."""
        return places.round().clamp_(self.low, self.high)

    def step_at(self, codes: torch.Tensor) -> torch.Tensor:
        """How far apart codes are: 1 everywhere."""
        return codes.new_ones(())

    def coded(
        self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
    ) -> "QuantizedWeight":
        """The weight of codes [N, K] fp32, scales and zero points [N, G]."""
        return QuantizedWeight(codes.to(torch.int8), scale, zero)

    @property
    def steps_at_end(self) -> int:
        """The largest code over how far it is from the next one."""
        return self.high

    @property
    def low(self) -> int:
        """Smallest code."""
        return -(1 << (self.num_bits - 1))

    @property
    def high(self) -> int:
        """Largest code."""
        return (1 << (self.num_bits - 1)) - 1


@dataclass(frozen=True)
class QuantizedWeight:
    """Codes with their grid.

    Args:
        codes: [N, K] int8.
        scale: [N, G] in ``scale_dtype``; G = K / group_size, or 1 per channel.
        zero: [N, G] int8, or None when symmetric.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None

    def dequantize(self) -> torch.Tensor:
        """The weights these codes stand for, [N, K] fp32."""
        n, k = self.codes.shape
        grouped = self.codes.float().view(n, self.scale.shape[1], -1)
        if self.zero is not None:
            grouped = grouped - self.zero.float().unsqueeze(-1)
        return (grouped * self.scale.float().unsqueeze(-1)).view(n, k)


@dataclass(frozen=True)
class IntegerGrid:
    """A weight's integer grid, fixed: values are rounded onto it.

    Args:
        spec: its shape.
        scale: [N, G] in ``scale_dtype``.
        zero: [N, G] int8, or None when symmetric.
    """

    spec: GridSpec
    scale: torch.Tensor
    zero: torch.Tensor | None

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """The nearest values on the grid, [N, K] fp32."""
        return self.encode(values).dequantize()

    def encode(self, values: torch.Tensor) -> QuantizedWeight:
        """The nearest codes of values [N, K]; exact for values that are on the grid already."""
        codes = torch.empty(values.shape, dtype=torch.int8, device=values.device)
        for rows in row_slices(values):
            zero = None if self.zero is None else self.zero[rows]
            codes[rows] = encode(values[rows].float(), self.scale[rows], zero, self.spec)
        return QuantizedWeight(codes, self.scale, self.zero)

    def by_column(self, order: torch.Tensor) -> ColumnRounding:
        """Rounding of one input channel at a time; see :class:`Grid`."""
        k = self.spec.group_size or order.shape[0]
        group_of = (order // k).tolist()
        # Groups are rows here, so that one visited channel's is contiguous memory.
        scales = self.scale.float().T.contiguous()
        zeros = None if self.zero is None else self.zero.float().T.contiguous()

        def rounded(position: int, values: torch.Tensor) -> torch.Tensor:
            group = group_of[position]
            scale = scales[group]
            zero = 0.0 if zeros is None else zeros[group]
            code = (values / scale + zero).round_().clamp_(self.spec.low, self.spec.high)
            return (code - zero) * scale

        return rounded


def fit_grid(
    weight: torch.Tensor, spec: GridSpec, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales (and zero points) that minimise the importance-weighted squared rounding error.

    Args:
        weight: [N, K] any float dtype.
        spec: the grid; K must be a multiple of ``group_size``.
        importance: [K] fp32 non-negative weight of each input channel's error, e.g. the Hessian's
            diagonal.

    Returns:
        scale [N, G] in ``spec.scale_dtype`` and zero [N, G] int8 or None.

    Raises:
        ValueError: if ``group_size`` does not divide K.
    """
    k = weight.shape[1]
    group = spec.group_size or k
    if k % group:
        raise ValueError(f"group_size {group} does not divide K = {k}")
    cost = torch.ones(k) if importance is None else importance
    cost = cost.to(weight.device, torch.float32).view(1, k // group, group)
    parts = [
        _fit(weight[rows].float().view(-1, *cost.shape[1:]), spec, cost)
        for rows in row_slices(weight)
    ]
    scale, zero = (torch.cat(one) for one in zip(*parts, strict=True))
    return scale.to(spec.scale_dtype), None if spec.symmetric else zero.to(torch.int8)


def _fit(
    grouped: torch.Tensor, spec: GridSpec, cost: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [N, G] fp32 of groups [N, G, size] with costs [1, G, size]."""
    best_error = torch.full(grouped.shape[:2], torch.inf, device=grouped.device)
    best_scale = torch.zeros_like(best_error)
    best_zero = torch.zeros_like(best_error)
    ends = _ends(grouped, spec)
    for shrink in _SHRINK_FACTORS if spec.num_bits < 8 else (1.0,):
        scale, zero = _range_grid(ends, spec, shrink)
        codes = _round_codes(grouped, scale, zero, spec)
        codes.sub_(zero[..., None]).mul_(scale[..., None])  # now the weights they stand for
        error = codes.sub_(grouped).square_().mul_(cost).sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


def encode(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, spec: GridSpec
) -> torch.Tensor:
    """Nearest codes.

    Args:
        weight: [N, K] fp32.
        scale: [N, G].
        zero: [N, G] or None.
        spec: the grid.

    Returns:
        [N, K] fp32 holding integers in ``[spec.low, spec.high]``.
    """
    n, k = weight.shape
    grouped = weight.view(n, scale.shape[1], -1)
    zeros = torch.zeros_like(scale) if zero is None else zero
    return _round_codes(grouped, scale.float(), zeros.float(), spec).view(n, k)


def _ends(grouped: torch.Tensor, spec: GridSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of lowest and highest code, both [N, G]: zero between them, or in the middle."""
    if spec.symmetric and spec.signed_scales:
        far = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))[..., 0]
        return far, -far
    if spec.symmetric:
        absmax = grouped.abs().amax(-1)
        return -absmax, absmax
    return grouped.amin(-1).clamp(max=0.0), grouped.amax(-1).clamp(min=0.0)


def _range_grid(
    ends: tuple[torch.Tensor, torch.Tensor], spec: GridSpec, shrink: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of each group's range shrunk by ``shrink``; both [N, G] fp32."""
    tiny = torch.finfo(torch.float32).tiny
    low, high = (end * shrink for end in ends)
    if spec.symmetric:
        # Half a step below absmax, so that both ends of the signed range are used.
        scale = (high / ((spec.high - spec.low) / 2)).to(spec.scale_dtype).float()
        return _nonzero(scale, tiny), torch.zeros_like(scale)
    scale = _nonzero(((high - low) / (spec.high - spec.low)).to(spec.scale_dtype).float(), tiny)
    zero = (spec.low - low / scale).round().clamp(spec.low, spec.high)
    return scale, zero


def _nonzero(scale: torch.Tensor, tiny: float) -> torch.Tensor:
    # A group of zeros gets scale 1: its codes are zero either way, and nothing divides by zero.
    return torch.where(scale.abs() > tiny, scale, torch.ones_like(scale))


def _round_codes(
    grouped: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, spec: GridSpec
) -> torch.Tensor:
    codes = grouped / scale[..., None]
    return codes.add_(zero[..., None]).round_().clamp_(spec.low, spec.high)


def fake_quantize_tokens(x: torch.Tensor, num_bits: int = 8) -> torch.Tensor:
    """Round activations as a W8A8 engine does: symmetric, one scale per token, from that token.

    Args:
        x: [..., K] any float dtype.
        num_bits: activation bits.

    Returns:
        Same shape and dtype as ``x``, on the integer grid.
    """
    high = (1 << (num_bits - 1)) - 1
    values = x.float()
    scale = values.abs().amax(-1, keepdim=True).clamp_(min=1e-10) / high
    return (values / scale).round_().clamp_(-high - 1, high).mul_(scale).to(x.dtype)
