"""What tests and benchmarks of kernels share: inputs, the error budget, the NaN poison.

The error budget replaces guessed tolerances. The gold result is the reference on the same inputs
upcast to fp64; a kernel may be off by twice what the low-precision reference is off, plus one
rounding of the largest output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from taut_kernels.gemm.w4a16 import disk as formats
from taut_kernels.gemm.w4a16 import layout as formats_mma
from taut_kernels.launch import launcher

BUDGET_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class W4A16Case:
    """Random operands of one W4A16 product, as on disk.

    Attributes:
        x: [M, K] activations.
        values: [N, K] int8 weights in -8..7.
        zeros: [N, K/G] int8 zero points in -8..7, or None.
        weight_packed: disk layout of ``values``.
        weight_scale: [N, K/G] disk scales.
        weight_zero_point: disk layout of ``zeros``, or None.
        bias: [N] or None.
        group_size: G, already K for one group a channel.
    """

    x: Tensor
    values: Tensor
    zeros: Tensor | None
    weight_packed: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor | None
    bias: Tensor | None
    group_size: int

    def operands(self) -> tuple[Any, ...]:
        """Return the arguments of `taut::w4a16_gemm` in order, repacked anew.

        Raises:
            ValueError: the shape has no GPU layout.
        """
        (N, K), zero = self.values.shape, self.weight_zero_point
        return (
            self.x,
            formats_mma.repack_weight(self.weight_packed, K),
            formats_mma.repack_scale(self.weight_scale),
            None if zero is None else formats_mma.repack_zero_point(zero, N),
            self.bias,
            torch.zeros(N // formats_mma.ROW_TILE, dtype=torch.int32, device=self.x.device),
            self.group_size,
        )

    def gold(self) -> Tensor:
        """Return the product [M, N] in fp64, straight from the unpacked weights."""
        N, K = self.values.shape
        values = self.values.double().view(N, -1, self.group_size)
        if self.zeros is not None:
            values = values - self.zeros.double().unsqueeze(-1)
        weight = (values * self.weight_scale.double().unsqueeze(-1)).view(N, K)
        y = self.x.double() @ weight.t()
        return y if self.bias is None else y + self.bias.double()

    def reference(self) -> Tensor:
        """Return the product [M, N] in the dtype of ``x``: weights exact, fp32 accumulation."""
        return self._product(lambda weight: weight)

    def rounded_reference(self) -> Tensor:
        """Return the product [M, N] with each dequantised weight rounded to the dtype of ``x``.

        What Marlin, Machete and our kernels beyond 16 tokens compute; fp32 accumulation.
        """
        return self._product(lambda weight: weight.to(self.x.dtype).float())

    def _product(self, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        N, K = self.values.shape
        values = self.values.float().view(N, -1, self.group_size)
        if self.zeros is not None:
            values = values - self.zeros.float().unsqueeze(-1)
        weight = (values * self.weight_scale.float().unsqueeze(-1)).view(N, K)
        y = self.x.float() @ rounded(weight).t()
        return (y if self.bias is None else y + self.bias.float()).to(self.x.dtype)


def make_w4a16_case(
    M: int,
    N: int,
    K: int,
    group_size: int,
    *,
    dtype: torch.dtype,
    asymmetric: bool = False,
    with_bias: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> W4A16Case:
    """Draw a product whose outputs are of order 1.

    Args:
        M: tokens.
        N: output features.
        K: input features.
        group_size: G, or -1 for one group a channel.
        dtype: of activations and scales.
        asymmetric: with zero points.
        with_bias: with a bias.
        device: where to put the operands.
        seed: of the generator; equal seeds give equal cases on every device.

    Returns:
        The case.
    """
    generator = torch.Generator().manual_seed(seed)
    group = K if group_size == -1 else group_size
    values = torch.randint(-8, 8, (N, K), generator=generator).to(torch.int8)
    scale = (torch.rand(N, K // group, generator=generator) + 0.5) / (5 * K**0.5)
    x = torch.randn(M, K, generator=generator).to(dtype)
    zeros = torch.randint(-8, 8, (N, K // group), generator=generator).to(torch.int8)
    bias = torch.randn(N, generator=generator).to(dtype)
    if not asymmetric:  # a symmetric group's far end has the lowest code, whichever its sign
        scale *= torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1
    weight_packed = formats.pack_weight(values)
    weight_scale = scale.to(dtype)
    zero_packed = formats.pack_zero_point(zeros) if asymmetric else None
    return W4A16Case(
        x=x.to(device),
        values=values.to(device),
        zeros=zeros.to(device) if asymmetric else None,
        weight_packed=weight_packed.to(device),
        weight_scale=weight_scale.to(device),
        weight_zero_point=None if zero_packed is None else zero_packed.to(device),
        bias=bias.to(device) if with_bias else None,
        group_size=group,
    )


def max_error(actual: Tensor, gold: Tensor) -> float:
    """Return the largest absolute difference, in fp64."""
    return (actual.double() - gold).abs().max().item() if gold.numel() else 0.0


def why_outside_budget(actual: Tensor, gold: Tensor, reference: Tensor) -> str | None:
    """Return why :func:`assert_within_budget` would fail, or None."""
    try:
        assert_within_budget(actual, gold, reference)
    except AssertionError as error:
        return str(error)
    return None


def assert_within_budget(
    actual: Tensor, gold: Tensor, reference: Tensor, cancelled: float = 0.0
) -> None:
    """Hold a result to the error budget.

    Args:
        actual: what the kernel computed, any float dtype.
        gold: the same product in fp64.
        reference: the specification's result in the dtype of ``actual``.
        cancelled: largest magnitude of fp32 terms whose difference the result is. Where all of it
            cancels (the gradient of a norm over one column) the error is a rounding of the terms,
            not of the result, and the reference's own may be 0 by luck.

    Raises:
        AssertionError: wrong shape or dtype, a value that is not finite, or an error above the
            budget.
    """
    assert actual.shape == gold.shape, f"shape {tuple(actual.shape)} ≠ {tuple(gold.shape)}"
    assert actual.dtype == reference.dtype, f"dtype {actual.dtype} ≠ {reference.dtype}"
    assert torch.isfinite(actual).all(), "result holds values that are not finite"
    if not gold.numel():
        return
    rounding = torch.finfo(actual.dtype).eps * gold.abs().max().item()
    rounding += torch.finfo(torch.float32).eps * cancelled
    budget = BUDGET_FACTOR * (max_error(reference, gold) + rounding)
    error = max_error(actual, gold)
    assert error <= budget, f"error {error:.3e} is above the budget {budget:.3e}"


def _empty_nan(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not dtype.is_floating_point:
        return torch.full(shape, torch.iinfo(dtype).min, dtype=dtype, device=device)
    return torch.full(shape, float("nan"), device=device).to(dtype)


@contextmanager
def nan_poison() -> Iterator[None]:
    """Make launchers allocate outputs filled with NaN, so that an element nobody wrote shows.

    Integers, which have no NaN, are filled with their least value.
    """
    with mock.patch.object(launcher, "empty", _empty_nan):
        yield
