"""One random W4A16 layer on the GPU, in disk format, and what its product should be."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from taut_kernels import formats

_CHECKED_ROWS = 256


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and its activations.

    Attributes:
        x: [16 or more, K] activations; the first M rows are a call's.
        weight_packed: [N, K/8] int32, disk layout.
        weight_scale: [N, K/G].
        group_size: G.
        checked: [C] rows of x that results are held to, ascending (:func:`rows_to_check`).
        gold: [C, N] fp64, their product.
        budget: largest error the room's budget allows.
    """

    x: torch.Tensor
    weight_packed: torch.Tensor
    weight_scale: torch.Tensor
    group_size: int
    checked: torch.Tensor
    gold: torch.Tensor
    budget: float

    @property
    def N(self) -> int:  # noqa: N802
        """Output features."""
        return self.weight_packed.shape[0]

    @property
    def K(self) -> int:  # noqa: N802
        """Input features."""
        return self.x.shape[1]

    def weight_bytes(self) -> int:
        """Bytes of int4 weights and 16-bit scales: what a call cannot avoid reading."""
        return self.N * self.K // 2 + 2 * self.weight_scale.numel()

    def dense(self) -> torch.Tensor:
        """Return the weights [N, K] in the dtype of ``x``, each rounded once."""
        return self._dense(torch.float32).to(self.x.dtype)

    def _dense(self, dtype: torch.dtype) -> torch.Tensor:
        values = formats.unpack_weight(self.weight_packed, self.K).to(dtype)
        scale = self.weight_scale.to(dtype).unsqueeze(-1)
        return (values.view(self.N, -1, self.group_size) * scale).view(self.N, self.K)

    def why_wrong(self, y: torch.Tensor) -> str | None:
        """Hold the first rows' result to the budget; return a reason, None where it is right."""
        rows = self.checked[self.checked < y.shape[0]]
        error = (y[rows].double() - self.gold[: len(rows)]).abs().max().item()
        if error <= self.budget:
            return None
        return f"error {error:.3e} is above the budget {self.budget:.3e}"


def rows_to_check(rows: int, device: str) -> torch.Tensor:
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


def make_layer(N: int, K: int, group_size: int, rows: int, dtype: torch.dtype) -> Layer:
    """Draw a symmetric layer whose outputs are of order 1.

    Args:
        N: output features.
        K: input features, a multiple of ``group_size``.
        group_size: G.
        rows: tokens to draw.
        dtype: of activations and scales.

    Returns:
        The layer, on the current CUDA device.
    """
    generator = torch.Generator("cuda").manual_seed(N + K)
    low, high = -(2**31), 2**31
    packed = torch.randint(low, high, (N, K // 8), generator=generator, device="cuda").to(
        torch.int32
    )
    scale = torch.rand(N, K // group_size, generator=generator, device="cuda") + 0.5
    x = torch.randn(rows, K, generator=generator, device="cuda").to(dtype)
    checked = rows_to_check(rows, "cuda")
    layer = Layer(x, packed, (scale / (5 * K**0.5)).to(dtype), group_size, checked, x, 0.0)
    some = x[checked]
    gold = some.double() @ layer._dense(torch.float64).t()
    # The budget of taut_kernels.testing: twice the reference's error and one rounding. The rivals
    # round the dequantised weight as well, which this reference does too.
    reference = some.float() @ layer.dense().float().t()
    error = (reference.to(dtype).double() - gold).abs().max().item()
    budget = 2 * (error + torch.finfo(dtype).eps * gold.abs().max().item())
    return Layer(x, packed, layer.weight_scale, group_size, checked, gold, budget)
