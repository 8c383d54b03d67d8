"""One random W4A16 layer on the GPU, in disk format, and what its product should be."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from taut_kernels.gemm.w4a16 import disk as formats
from taut_kernels.gemm.w4a16 import layout as formats_mma
from taut_kernels.gemm.w4a16 import op as w4a16
from taut_kernels.gemm.w4a16.plan import Weight

_CHECKED_ROWS = 256


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and its activations.

    Attributes:
        x: [16 or more, K] activations; the first M rows are a call's.
        weight_packed: [N, K/8] int32, disk layout.
        weight_scale: [N, K/G].
        group_size: G, K for one group a channel.
        checked: [C] rows of x that results are held to, ascending (:func:`rows_to_check`).
        gold: [C, N] fp64, their product.
        budget: largest error the room's budget allows.
        weight_zero_point: [N/8, K/G] int32, disk layout; None where symmetric.
    """

    x: Tensor
    weight_packed: Tensor
    weight_scale: Tensor
    group_size: int
    checked: Tensor
    gold: Tensor
    budget: float
    weight_zero_point: Tensor | None = None

    @property
    def N(self) -> int:  # noqa: N802
        """Output features."""
        return self.weight_packed.shape[0]

    @property
    def K(self) -> int:  # noqa: N802
        """Input features."""
        return self.x.shape[1]

    def weight_bytes(self) -> int:
        """Bytes of 4-bit weights and zero points and 16-bit scales: what a call has to read."""
        zeros = 0 if self.weight_zero_point is None else 4 * self.weight_zero_point.numel()
        return self.N * self.K // 2 + 2 * self.weight_scale.numel() + zeros

    def stored_zeros(self) -> Tensor:
        """Return the zero points as stored, [N, K/G] int8 in 0..15: 8 where symmetric."""
        if self.weight_zero_point is None:
            return torch.full_like(self.weight_scale, formats.SYMMETRIC_ZERO, dtype=torch.int8)
        return formats.unpack_zero_point(self.weight_zero_point, self.N) + formats.SYMMETRIC_ZERO

    def dense(self) -> Tensor:
        """Return the weights [N, K] in the dtype of ``x``, each rounded once."""
        return self._dense(torch.float32).to(self.x.dtype)

    def _dense(self, dtype: torch.dtype) -> Tensor:
        values = formats.unpack_weight(self.weight_packed, self.K).to(dtype)
        groups = values.view(self.N, -1, self.group_size)
        if self.weight_zero_point is not None:
            groups = groups - (self.stored_zeros() - formats.SYMMETRIC_ZERO).to(dtype).unsqueeze(-1)
        scale = self.weight_scale.to(dtype).unsqueeze(-1)
        return (groups * scale).view(self.N, self.K)

    def packed(self, copies: int) -> list[Weight]:
        """Return the operands of our kernels that are the layer's, so many times."""
        qweight = formats_mma.repack_weight(self.weight_packed, self.K)
        scales = formats_mma.repack_scale(self.weight_scale)
        zeros = None
        if self.weight_zero_point is not None:
            zeros = formats_mma.repack_zero_point(self.weight_zero_point, self.N)
        return [
            Weight(
                qweight.clone(),
                scales.clone(),
                None if zeros is None else zeros.clone(),
                None,
                w4a16.make_arrivals(self.N, self.x.device),
            )
            for _ in range(copies)
        ]

    def why_wrong(self, y: Tensor) -> str | None:
        """Hold the first rows' result to the budget; return a reason, None where it is right."""
        rows = self.checked[self.checked < y.shape[0]]
        error = (y[rows].double() - self.gold[: len(rows)]).abs().max().item()
        if error <= self.budget:
            return None
        return f"error {error:.3e} is above the budget {self.budget:.3e}"


def rows_to_check(rows: int, device: str) -> Tensor:
    """Return the rows worth a product in fp64: the first ones, then some of all others.

    Every row of thousands would take fp64 a minute at 57344 × 8192.

    Args:
        rows: how many there are.
        device: of the result.

    Returns:
        Their numbers, ascending, the last row among them.
    """
    first = torch.arange(min(rows, _CHECKED_ROWS), device=device)
    if rows <= _CHECKED_ROWS:
        return first
    others = torch.linspace(_CHECKED_ROWS, rows - 1, _CHECKED_ROWS, device=device).round().long()
    return torch.cat([first, torch.unique(others)])


def make_layer(
    N: int,
    K: int,
    group_size: int,
    rows: int,
    dtype: torch.dtype,
    *,
    zero_points: bool = False,
    device: str = "cuda",
) -> Layer:
    """Draw a layer whose outputs are of order 1.

    Args:
        N: output features.
        K: input features, a multiple of ``group_size``.
        group_size: G in {32, 64, 128}, or -1 (or K) for one group a channel.
        rows: tokens to draw.
        dtype: of activations and scales, bfloat16 or float16.
        zero_points: with zero points, else symmetric.
        device: where to.

    Returns:
        The layer.

    Raises:
        ValueError: our kernels take no such layer; says why.
    """
    if reason := w4a16.why_not_supported(N, K, group_size, dtype):
        raise ValueError(f"{N}×{K}: {reason}")
    group = K if group_size == -1 else group_size
    generator = torch.Generator(device).manual_seed(N + K)
    packed = _random_words(N, K // 8, generator)
    scale = torch.rand(N, K // group, generator=generator, device=device) + 0.5
    x = torch.randn(rows, K, generator=generator, device=device).to(dtype)
    # Drawn last: a symmetric layer stays the one that was measured before there were zero points.
    zeros = _random_words(N // 8, K // group, generator) if zero_points else None
    checked = rows_to_check(rows, device)
    weight_scale = (scale / (5 * K**0.5)).to(dtype)
    return _judged(Layer(x, packed, weight_scale, group, checked, x, 0.0, zeros))


def empty_weight(
    N: int, K: int, group_size: int, *, zero_points: bool, device: str = "cuda"
) -> Weight:
    """Make operands of the right shapes and types: enough to compile a kernel by.

    Args:
        N: output features.
        K: input features.
        group_size: G in {32, 64, 128}.
        zero_points: with zero points, else symmetric.
        device: where to.
    """
    qweight = torch.zeros(N // 16, K // 64, 32, 4, dtype=torch.int32, device=device)
    quads = -(-K // group_size // formats_mma.GROUPS_PER_QUAD)
    scales = torch.zeros(N // 16, quads, 8, 4, 2, dtype=torch.bfloat16, device=device)
    zeros = None
    if zero_points:
        zeros = torch.zeros(N // 16, quads, 8, dtype=torch.int32, device=device)
    return Weight(qweight, scales, zeros, None, w4a16.make_arrivals(N, qweight.device))


def blank_layer(
    N: int, K: int, group_size: int, *, zero_points: bool, device: str = "cuda"
) -> Layer:
    """Make a bf16 layer of one token and zeros, as it lies on disk; as for :func:`empty_weight`."""
    x = torch.zeros(1, K, dtype=torch.bfloat16, device=device)
    packed = torch.zeros(N, K // 8, dtype=torch.int32, device=device)
    scale = torch.zeros(N, K // group_size, dtype=torch.bfloat16, device=device)
    zeros = None
    if zero_points:
        zeros = torch.zeros(N // 8, K // group_size, dtype=torch.int32, device=device)
    return Layer(x, packed, scale, group_size, rows_to_check(1, device), x, 0.0, zeros)


def _random_words(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw int32 words of eight random nibbles each."""
    size, device = (rows, columns), generator.device
    words = torch.randint(-(2**31), 2**31, size, generator=generator, device=device)
    return words.to(torch.int32)


def _judged(layer: Layer) -> Layer:
    """Fill in what the layer's product should be and how far from it a result may lie."""
    x, dtype = layer.x[layer.checked], layer.x.dtype
    gold = x.double() @ layer._dense(torch.float64).t()
    # The budget of taut_bench.testing: twice the reference's error and one rounding. The rivals
    # round the dequantised weight as well, which this reference does too.
    reference = x.float() @ layer.dense().float().t()
    error = (reference.to(dtype).double() - gold).abs().max().item()
    budget = 2 * (error + torch.finfo(dtype).eps * gold.abs().max().item())
    return replace(layer, gold=gold, budget=budget)
