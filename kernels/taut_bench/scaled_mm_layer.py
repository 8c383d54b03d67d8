"""One W8A8 product to time: the operands every kernel is fed, and what is wrong with a result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from taut_bench import testing
from taut_bench.shapes import LLAMA3_8B_PRODUCTS
from taut_kernels.gemm.scaled_mm import op_fp8 as fp8
from taut_kernels.gemm.scaled_mm import op_int8 as w8a8
from taut_kernels.gemm.scaled_mm.tile import BLOCK_GROUP

SHAPES = LLAMA3_8B_PRODUCTS
"""N × K of the products measured unless others are asked for."""
KINDS = {"fp8": "fp8_gemm", "int8": "w8a8_gemm"}
"""Name on the command line → op."""
BLOCK_KIND = "fp8-block"
"""FP8 with 128×128 blocks of weights and groups of 128 activations: measured where asked for."""
ALL_KINDS = KINDS | {BLOCK_KIND: fp8.BLOCK_OP}
OUT_DTYPE = torch.bfloat16

_NOTHING_GRANTED = 14336
"""K up to which FP8 results held the budget without what the tensor cores cut off."""
_CUT_A_STEP = 2.0**-14
"""Share of the largest output that Hopper's FP8 tensor cores lose in 32 products."""


def _rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def _rms_error(values: Tensor, gold: Tensor) -> float:
    return _rms(values.double() - gold)


# Kept for all copies of the weights: a call that a graph records must lay nothing out.
@lru_cache(maxsize=8)
def token_major(x_scale: Tensor, M: int, rows: int) -> Tensor:
    """Lay the first M tokens' scales out with tokens contiguous.

    Args:
        x_scale: [≥ M, G].
        M: tokens.
        rows: of the result, at least M; the others are 0.

    Returns:
        [rows, G], strides (1, rows).
    """
    columns = torch.zeros(x_scale.shape[1], rows, dtype=x_scale.dtype, device=x_scale.device)
    columns[:, :M] = x_scale[:M].t()
    return columns.t()


@dataclass(frozen=True, slots=True)
class Layer:
    """Operands of one product, scaled as vLLM's dynamic schemes do it.

    Attributes:
        op: ``fp8_gemm`` or ``w8a8_gemm``, scales per token and per channel; or ``fp8_block``.
        x: [M, K] e4m3 or int8.
        weight: [N, K] as ``x``.
        x_scale: [M, 1] fp32; with ``fp8_block`` [M, ceil(K/128)].
        weight_scale: [N, 1] fp32; with ``fp8_block`` [ceil(N/128), ceil(K/128)].
        gold: [M, N] fp64.
        reference: [M, N] bf16, the specification's result.
    """

    op: str
    x: Tensor
    weight: Tensor
    x_scale: Tensor
    weight_scale: Tensor
    gold: Tensor
    reference: Tensor

    def weight_bytes(self) -> int:
        """Return the bytes of weights and scales one call reads."""
        return self.weight.nbytes + self.weight_scale.nbytes

    def scales_of(self, M: int) -> Tensor:
        """Return the first M tokens' scales as vLLM's quantisation of M tokens leaves them.

        With ``fp8_block`` no slice of all tokens': there the next 128 of K would lie as far away as
        if all tokens were there.
        """
        if self.op == fp8.BLOCK_OP:
            return token_major(self.x_scale, M, M)
        return self.x_scale[:M]

    def why_wrong(self, y: Tensor) -> str | None:
        """Return why the first rows' result is outside the error budget, None where it is not.

        What Hopper's FP8 tensor cores cut off a sum (`testing_scaled_mm`) is granted beyond the
        longest K for which it was never needed; there the RMS error has to be small, too, as one
        step of K left out would not leave it. Block-wise sums end after 128 products.
        """
        M = y.shape[0]
        gold, reference = self.gold[:M], self.reference[:M]
        lost = self._granted_loss()
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

    def _granted_loss(self) -> float:
        """Return the share of the largest output that tensor cores may have cut off."""
        K = self.x.shape[1]
        if self.op == fp8.BLOCK_OP:
            return BLOCK_GROUP / 32 * _CUT_A_STEP
        return K / 32 * _CUT_A_STEP if self.op == fp8.OP and K > _NOTHING_GRANTED else 0.0


def make_layer(op: str, N: int, K: int, M: int, seed: int = 0, device: str = "cuda") -> Layer:
    """Draw a product whose outputs are of order 1.

    Args:
        op: ``fp8_gemm``, ``w8a8_gemm`` or ``fp8_block``.
        N: output features.
        K: input features.
        M: most tokens that will be asked for.
        seed: of the generator.
        device: where to put the operands.

    Returns:
        The layer.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(rows: int) -> Tensor:
        values = torch.randn(rows, K, generator=generator, device=device)
        if op != w8a8.OP:
            return values.to(fp8.DTYPE)
        return (values * 32).round().clamp(-127, 127).to(torch.int8)

    def scale(rows: int, middle: float) -> Tensor:
        uniform = torch.rand(rows, scale_columns, generator=generator, device=device)
        return (uniform + 0.5) * middle

    block_wise = op == fp8.BLOCK_OP
    scale_columns = -(-K // BLOCK_GROUP) if block_wise else 1
    scale_rows = -(-N // BLOCK_GROUP) if block_wise else N
    unit = 1 / 32 if op == w8a8.OP else 1.0
    x, weight = draw(M), draw(N)
    x_scale, weight_scale = scale(M, unit), scale(scale_rows, unit / K**0.5)
    gold = product_ref(op, x, weight, x_scale.double(), weight_scale.double(), torch.float64)
    reference = product_ref(op, x, weight, x_scale, weight_scale, OUT_DTYPE)
    return Layer(op, x, weight, x_scale, weight_scale, gold, reference)


def product_ref(
    op: str,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return a product's specification, without zero points and bias; operands as :class:`Layer`'s.

    Args:
        op: its name.
        x: [M, K].
        weight: [N, K].
        x_scale: in fp64 for a result in fp64.
        weight_scale: likewise.
        out_dtype: of the result [M, N].
    """
    if op != w8a8.OP:
        return fp8.fp8_gemm_ref(x, weight, x_scale, weight_scale, None, None, out_dtype)
    return w8a8.w8a8_gemm_ref(x, weight, x_scale, weight_scale, None, None, None, None, out_dtype)
