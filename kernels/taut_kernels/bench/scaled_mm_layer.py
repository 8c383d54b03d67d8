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
        """Return why the first rows' result is outside the error budget, None where it is not."""
        M = y.shape[0]
        try:
            testing.assert_within_budget(y, self.gold[:M], self.reference[:M])
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
