"""Random operands of the 8-bit products, for tests: int8 and FP8, every way of scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taut_bench import testing
from taut_kernels.gemm.scaled_mm import op_fp8 as fp8
from taut_kernels.gemm.scaled_mm import op_int8 as w8a8
from taut_kernels.gemm.scaled_mm.dispatch import launch, launch_block, make_arrivals
from taut_kernels.gemm.scaled_mm.tile import BLOCK_GROUP, ScaledMmTile


@dataclass(frozen=True, slots=True)
class ScaledMmCase:
    """Operands of one product.

    Attributes:
        op: ``w8a8_gemm`` or ``fp8_gemm``.
        x: [M, K] int8 or e4m3.
        weight: [N, K] as ``x``.
        x_scale: one element, [M, 1], or [M, ceil(K/128)].
        weight_scale: one element, [N, 1], or [ceil(N/128), ceil(K/128)].
        azp_adj: [N] int32 or None.
        azp: [M, 1] int32 or None.
        bias: [N] or None.
        arrivals: the layer's counters.
        out_dtype: of the result.
    """

    op: str
    x: Tensor
    weight: Tensor
    x_scale: Tensor
    weight_scale: Tensor
    azp_adj: Tensor | None
    azp: Tensor | None
    bias: Tensor | None
    arrivals: Tensor
    out_dtype: torch.dtype

    def operands(self) -> tuple[Any, ...]:
        """Return the op's arguments in order."""
        tensors = (self.x, self.weight, self.x_scale, self.weight_scale)
        zeros = (self.azp_adj, self.azp) if self.op == "w8a8_gemm" else ()
        return (*tensors, *zeros, self.bias, self.arrivals, self.out_dtype)

    def reference(self) -> Tensor:
        """Return the specification's result."""
        reference = w8a8.w8a8_gemm_ref if self.op == "w8a8_gemm" else fp8.fp8_gemm_ref
        return reference(*self.operands())

    def why_wrong(self, actual: Tensor) -> str | None:
        """Hold a GPU kernel's result to the error budget; return a reason, None where it is right.

        Hopper's FP8 tensor cores cut what they add (:func:`fp8_tensor_core_sums`), which the
        specification in fp32 does not know: products of random signs lose 2**-14 of the largest
        output in 32 products on average. Block-wise sums end after 4 steps.
        """
        gold = self.gold()
        rounding = torch.finfo(self.out_dtype).eps * gold.abs().max().item()
        budget = 2 * (testing.max_error(self.reference(), gold) + rounding)
        if self.op == "fp8_gemm":
            steps = 4 if self.x_scale.shape[-1] > 1 else self.x.shape[1] // 32
            budget += steps * 2.0**-14 * gold.abs().max().item()
        if not torch.isfinite(actual).all():
            return "result holds values that are not finite"
        error = testing.max_error(actual, gold)
        return None if error <= budget else f"error {error:.3e} is above the budget {budget:.3e}"

    def gold(self) -> Tensor:
        """Return the product in fp64, written out without the specification."""
        M, K = self.x.shape
        x = self.x.double()
        if self.azp is not None:
            x = x - self.azp.double().view(M, 1)
        weight, w_scale = self.weight.double(), self.weight_scale.double()
        if fp8.is_block_wise(self.weight, self.weight_scale):
            n, k = torch.arange(len(weight)) // BLOCK_GROUP, torch.arange(K) // BLOCK_GROUP
            weight = weight * w_scale[n.to(x.device)][:, k.to(x.device)]
            y = (x * self.x_scale.double()[:, k.to(x.device)]) @ weight.t()
        else:
            y = x @ weight.t()
            if self.azp is None and self.azp_adj is not None:
                y = y - self.azp_adj.double()
            y = y * w_scale.view(1, -1) * self.x_scale.double().view(-1, 1)
        return y if self.bias is None else y + self.bias.double()


def fp8_tensor_core_sums(x: Tensor, weight: Tensor) -> Tensor:
    """Add products as Hopper's FP8 tensor cores do, in fp64 on any device.

    An instruction adds 32 products to a sum and cuts each of these 33 numbers at 2**-13 of the
    largest power of two in them: equal products lose more the longer the sum is, and those smaller
    than that are lost whole. Found from the errors of an H200 (2026-11-23: 109.25 of 6,321 on 2,064
    equal products, this and the rounding to fp16).

    Args:
        x: [M, K] e4m3.
        weight: [N, K] e4m3.

    Returns:
        [M, N] fp64, without scales.
    """
    sums = torch.zeros(len(x), len(weight), dtype=torch.float64, device=x.device)
    steps = (torch.split(operand.double(), 32, dim=1) for operand in (x, weight))
    for left, right in zip(*steps, strict=True):
        terms = torch.cat([left[:, None] * right[None], sums[..., None]], -1)
        exponent = torch.frexp(terms.abs().amax(-1, keepdim=True)).exponent - 1
        unit = torch.ldexp(torch.ones_like(terms[..., :1]), exponent - 13)
        sums = (torch.trunc(terms / unit) * unit).sum(-1)
    return sums


def cut_results(case: ScaledMmCase) -> Tensor:
    """Return what tensor cores that cut sums make of a case of :func:`extreme_case`.

    Block-wise sums begin anew every 128 products. Where an instruction converts e4m3 first, or K is
    split, less is lost.

    Args:
        case: FP8, without a bias; rows are equal, and every second feature.

    Returns:
        [1, 2] in ``out_dtype``: a feature with an outlier, and one without.
    """
    step = BLOCK_GROUP if fp8.is_block_wise(case.weight, case.weight_scale) else case.x.shape[1]
    x, weight = torch.split(case.x[:1], step, 1), torch.split(case.weight[:2], step, 1)
    sums = torch.stack([fp8_tensor_core_sums(*pair) for pair in zip(x, weight, strict=True)])
    return (sums.sum(0) * case.weight_scale.flatten()[0].double()).to(case.out_dtype)


def launch_case(tile: ScaledMmTile, case: ScaledMmCase) -> Tensor:
    """Run one tile on a product with scales per tensor, token or channel."""
    tensors = (case.x, case.weight, case.x_scale, case.weight_scale)
    optional = (case.azp_adj, case.azp, case.bias, case.arrivals)
    return launch(tile, *tensors, *optional, case.out_dtype)


def launch_block_case(tile: ScaledMmTile, case: ScaledMmCase) -> Tensor:
    """Run one tile on a product with blocks of weights, in poisoned memory.

    Raises:
        AssertionError: the counters are no zeros for the next call.
    """
    tensors = (case.x, case.weight, case.x_scale, case.weight_scale, case.bias)
    with testing.nan_poison():
        y = launch_block(tile, *tensors, case.arrivals, case.out_dtype)
    assert not case.arrivals.any()
    return y


def make_scaled_mm_case(
    op: str,
    M: int,
    N: int,
    K: int,
    *,
    scaling: str = "row",
    zero_points: str = "none",
    with_bias: bool = False,
    out_dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    seed: int = 0,
) -> ScaledMmCase:
    """Draw a product whose outputs are of order 1.

    Args:
        op: ``w8a8_gemm`` or ``fp8_gemm``.
        M: tokens.
        N: output features.
        K: input features.
        scaling: ``tensor``, ``row`` (token × channel) or ``block``.
        zero_points: ``none``, ``static`` (folded into azp_adj) or ``token``.
        with_bias: with a bias.
        out_dtype: of the result and the bias.
        device: where to put the operands.
        seed: of the generator; equal seeds give equal cases on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    unit = 1.0 if op == "fp8_gemm" else 1 / 64

    def draw(rows: int) -> Tensor:
        if op == "fp8_gemm":
            return torch.randn(rows, K, generator=generator).to(fp8.DTYPE)
        return torch.randint(-128, 128, (rows, K), generator=generator).to(torch.int8)

    def scale(shape: tuple[int, ...], middle: float) -> Tensor:
        return (torch.rand(shape, generator=generator) + 0.5) * middle

    blocks = -(-K // BLOCK_GROUP)
    x_shape = {"tensor": (1,), "row": (M, 1), "block": (M, blocks)}[scaling]
    w_shape = {"tensor": (1,), "row": (N, 1), "block": (-(-N // BLOCK_GROUP), blocks)}[scaling]
    x, weight = draw(M), draw(N)
    x_scale, weight_scale = scale(x_shape, unit), scale(w_shape, unit / K**0.5)
    bias = torch.randn(N, generator=generator).to(out_dtype)
    azp = torch.randint(-20, 20, (M, 1), generator=generator, dtype=torch.int32)
    azp_adj = weight.float().sum(1).to(torch.int32)
    adjustment = {"none": None, "static": 7 * azp_adj, "token": azp_adj}[zero_points]
    return ScaledMmCase(
        op=op,
        x=x.to(device),
        weight=weight.to(device),
        x_scale=x_scale.to(device),
        weight_scale=weight_scale.to(device),
        azp_adj=None if adjustment is None else adjustment.to(device),
        azp=azp.to(device) if zero_points == "token" else None,
        bias=bias.to(device) if with_bias else None,
        arrivals=make_arrivals(N, torch.device(device)),
        out_dtype=out_dtype,
    )


EXTREMES = {
    "zeros": ("fp8_gemm", 0.0, 0.0, 1.0),
    "minus zeros": ("fp8_gemm", -0.0, 1.0, 1.0),
    "largest e4m3": ("fp8_gemm", 448.0, -448.0, 2.0**-16),
    "least e4m3": ("fp8_gemm", 2.0**-9, 2.0**-9, 2.0**10),
    "saturated int8": ("w8a8_gemm", -128, 127, 2.0**-16),
}
"""Name → op, and the value of x, of the weights, and of their scale."""


def extreme_case(
    name: str, M: int, N: int, K: int, *, scaling: str = "row", device: str = "cpu"
) -> ScaledMmCase:
    """Everything one value, but for a column of outliers in every second feature.

    Args:
        name: of :data:`EXTREMES`.
        M: rows.
        N: output features.
        K: input features.
        scaling: as for :func:`make_scaled_mm_case`.
        device: of all tensors.
    """
    op, x, weight, scale = EXTREMES[name]
    case = make_scaled_mm_case(op, M, N, K, scaling=scaling, device=device)
    case.x.fill_(x)
    case.weight.fill_(weight)
    case.weight[::2, 5] = 100
    case.x_scale.fill_(1.0)
    case.weight_scale.fill_(scale)
    return case
