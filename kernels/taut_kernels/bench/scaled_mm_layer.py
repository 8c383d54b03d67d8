"""One W8A8 product to time: the operands every kernel is fed, and what is wrong with a result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from taut_kernels import testing
from taut_kernels.bench.shapes import LLAMA3_8B_PRODUCTS
from taut_kernels.gemm import fp8, w8a8

SHAPES = LLAMA3_8B_PRODUCTS
"""N × K of the products measured unless others are asked for."""
KINDS = {"fp8": "fp8_gemm", "int8": "w8a8_gemm"}
"""Name on the command line → op."""
OUT_DTYPE = torch.bfloat16

_NOTHING_GRANTED = 14336
"""K up to which FP8 results held the budget without what the tensor cores cut off."""


def _rms(values: torch.Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def _rms_error(values: torch.Tensor, gold: torch.Tensor) -> float:
    return _rms(values.double() - gold)


@dataclass(frozen=True, slots=True)
class Layer:
    """Operands of one product, scales per token and per channel as vLLM's dynamic schemes have.

    Attributes:
        op: ``fp8_gemm`` or ``w8a8_gemm``.
        x: [M, K] e4m3 or int8.
        weight: [N, K] as ``x``.
        x_scale: [M, 1] fp32.
        weight_scale: [N, 1] fp32.
        gold: [M, N] fp64.
        reference: [M, N] bf16, the specification's result.
    """

    op: str
    x: torch.Tensor
    weight: torch.Tensor
    x_scale: torch.Tensor
    weight_scale: torch.Tensor
    gold: torch.Tensor
    reference: torch.Tensor

    def weight_bytes(self) -> int:
        """Return the bytes of weights and scales one call reads."""
        return self.weight.nbytes + self.weight_scale.nbytes

    def why_wrong(self, y: torch.Tensor) -> str | None:
        """Return why the first rows' result is outside the error budget, None where it is not.

        What Hopper's FP8 tensor cores cut off a sum (`testing_scaled_mm`) is granted beyond the
        longest K for which it was never needed; there the RMS error has to be small, too, as one
        step of K left out would not leave it.
        """
        M, K = y.shape[0], self.x.shape[1]
        gold, reference = self.gold[:M], self.reference[:M]
        lost = K / 32 * 2.0**-14 if self.op == "fp8_gemm" and K > _NOTHING_GRANTED else 0.0
        if lost and y.isfinite().all():
            most = 2 * (_rms_error(reference, gold) + torch.finfo(y.dtype).eps * _rms(gold))
            most += lost / 2 * _rms(gold)
            if (error := _rms_error(y, gold)) > most:
                return f"RMS error {error:.3e} is above {most:.3e}"
        # In units of fp32's rounding, as the budget takes what cancelled.
        granted = lost / 2 / torch.finfo(torch.float32).eps * gold.abs().max().item()
        try:
            testing.assert_within_budget(y, gold, reference, granted)
        except AssertionError as error:
            return str(error)
        return None


def make_layer(op: str, N: int, K: int, M: int, seed: int = 0) -> Layer:
    """Draw a product on the current CUDA device, outputs of order 1.

    Args:
        op: ``fp8_gemm`` or ``w8a8_gemm``.
        N: output features.
        K: input features.
        M: most tokens that will be asked for.
        seed: of the generator.

    Returns:
        The layer.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(rows: int) -> torch.Tensor:
        values = torch.randn(rows, K, generator=generator, device="cuda")
        if op == "fp8_gemm":
            return values.to(fp8.DTYPE)
        return (values * 32).round().clamp(-127, 127).to(torch.int8)

    def scale(rows: int, middle: float) -> torch.Tensor:
        return (torch.rand(rows, 1, generator=generator, device="cuda") + 0.5) * middle

    unit = 1.0 if op == "fp8_gemm" else 1 / 32
    x, weight = draw(M), draw(N)
    x_scale, weight_scale = scale(M, unit), scale(N, unit / K**0.5)
    gold = _product(op, x, weight, x_scale.double(), weight_scale.double(), torch.float64)
    reference = _product(op, x, weight, x_scale, weight_scale, OUT_DTYPE)
    return Layer(op, x, weight, x_scale, weight_scale, gold, reference)


def _product(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if op == "fp8_gemm":
        return fp8.fp8_gemm_ref(x, weight, x_scale, weight_scale, None, None, out_dtype)
    return w8a8.w8a8_gemm_ref(x, weight, x_scale, weight_scale, None, None, None, None, out_dtype)
