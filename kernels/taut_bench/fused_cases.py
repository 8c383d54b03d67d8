"""What the fused-op benchmark runs: forms, operands, our calls and the gate every result passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from taut_bench.model_sizes import Model
from taut_bench.shapes import MODELS
from taut_kernels.activation import silu_mul
from taut_kernels.norm import rms_norm
from taut_kernels.rope import op as rope
from taut_kernels.rowwise import quantize, row_quant

_REGISTERING = (quantize,)  # importing an op's module registers it

EPSILON = 1e-5
HEAD_DIM = 128
_POSITIONS = 8192


@dataclass(frozen=True, slots=True)
class Form:
    """One benchmarked operation.

    Attributes:
        op: its name in :mod:`taut_kernels.rowwise.tiles`.
        out: ``same``, ``fp8`` or ``int8``.
        gpt_oss: an activation of gpt-oss's form, not SiLU·mul.
    """

    op: str
    out: str
    gpt_oss: bool = False

    @property
    def activation(self) -> tuple[float, float, float | None, bool]:
        """Alpha, shift, limit and whether gate and up alternate, of ``silu_mul``."""
        return (1.702, 1.0, 7.0, True) if self.gpt_oss else (1.0, 0.0, None, False)

    def width(self, model: Model) -> int:
        """Return N of a model's layer on one rank: columns of the output, or heads of q and k."""
        if self.op.startswith("silu"):
            return model.intermediate // model.ranks
        if self.op == "row_quant":  # of what attention writes
            return model.heads * model.head_dim // model.ranks
        if self.op == "rope":
            return (model.heads + model.kv_heads) // model.ranks
        return model.hidden


FORMS = {
    "rms_norm": Form("rms_norm", "same"),
    "add_rms_norm": Form("add_rms_norm", "same"),
    "rms_norm_fp8": Form("rms_norm_quant", "fp8"),
    "add_rms_norm_fp8": Form("add_rms_norm_quant", "fp8"),
    "add_rms_norm_int8": Form("add_rms_norm_quant", "int8"),
    "silu_mul": Form("silu_mul", "same"),
    "silu_mul_fp8": Form("silu_mul_quant", "fp8"),
    "silu_mul_int8": Form("silu_mul_quant", "int8"),
    "quant_fp8": Form("row_quant", "fp8"),
    "quant_int8": Form("row_quant", "int8"),
    "rope": Form("rope", "same"),
    "rms_norm_int8": Form("rms_norm_quant", "int8"),
    "gpt_oss": Form("silu_mul", "same", gpt_oss=True),
    "gpt_oss_fp8": Form("silu_mul_quant", "fp8", gpt_oss=True),
    "gpt_oss_int8": Form("silu_mul_quant", "int8", gpt_oss=True),
}
_KV_HEADS = {FORMS["rope"].width(model): model.kv_heads // model.ranks for model in MODELS.values()}
"""Heads of q and k together → heads of k; 8 for a number of heads no model has."""


@dataclass(frozen=True, slots=True)
class Operands:
    """One copy of a form's inputs on the GPU; absent ones are None.

    Attributes:
        x: [M, N] ([M, 2N] for ``silu_mul``), or [M, heads · 128] q and k beside each other.
        weight: [N].
        residual: [M, N].
        positions: [M] int64.
        cache: [P, 128] cosines and sines.
    """

    x: Tensor
    weight: Tensor | None = None
    residual: Tensor | None = None
    positions: Tensor | None = None
    cache: Tensor | None = None

    @property
    def q(self) -> Tensor:
        """[M, Hq · 128] of ``rope``."""
        return self.x[:, : -self._kv_columns]

    @property
    def k(self) -> Tensor:
        """[M, Hk · 128] of ``rope``."""
        return self.x[:, -self._kv_columns :]

    @property
    def _kv_columns(self) -> int:
        return HEAD_DIM * _KV_HEADS.get(self.x.shape[1] // HEAD_DIM, 8)


def make_operands(form: Form, N: int, M: int, seed: int = 0) -> Operands:
    """Draw one copy of a form's bf16 inputs.

    Args:
        form: which operation.
        N: a width.
        M: tokens.
        seed: of the generator.

    Returns:
        The operands, on the current CUDA device.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)

    if form.op.startswith("silu"):
        return Operands(draw(M, 2 * N))
    if form.op == "rope":
        angles = torch.rand(_POSITIONS, HEAD_DIM // 2, generator=generator, device="cuda") * 6.28
        cache = torch.cat((angles.cos(), angles.sin()), dim=1).to(torch.bfloat16)
        positions = torch.randint(0, _POSITIONS, (M,), generator=generator, device="cuda")
        return Operands(draw(M, N * HEAD_DIM), positions=positions, cache=cache)
    if form.op == "row_quant":
        return Operands(draw(M, N))
    residual = draw(M, N) if form.op.startswith("add_") else None
    return Operands(draw(M, N), weight=draw(N) * 0.1 + 1, residual=residual)


def bytes_moved(form: Form, N: int, M: int) -> int:
    """Return what a call cannot avoid reading and writing."""
    if form.op == "rope":
        return 2 * 2 * M * N * HEAD_DIM + M * 8
    written = 2 if form.out == "same" else 1
    if form.op.startswith("silu"):
        return M * N * (4 + written)
    if form.op == "row_quant":
        return M * N * (2 + written)
    residual = 4 if form.op.startswith("add_") else 0
    return M * N * (2 + written + residual) + 2 * N


Result = Tensor | tuple[Tensor, Tensor]
"""An output, or 8-bit values and their scales."""
Call = Callable[[int], Result]
"""Runs the operation on the i-th copy of its operands."""
Prepare = Callable[[Form, Sequence[Operands]], Call]


def quantised_dtype(form: Form) -> torch.dtype:
    """Return the 8-bit type of a form's output."""
    return row_quant.FP8 if form.out == "fp8" else row_quant.INT8


def _keep(copies: int) -> list[Result | None]:
    # Results stay alive until their copy comes round again: an output written over and over at one
    # address would never leave L2.
    return [None] * copies


def taut(form: Form, copies: Sequence[Operands]) -> Call:
    """Prepare our op."""
    kept = _keep(len(copies))

    def call(i: int) -> Result:
        result = _taut(form, copies[i])
        kept[i] = result
        return result

    return call


def _taut(form: Form, operands: Operands) -> Result:
    ops, x = torch.ops.taut, operands.x
    result: Result
    if form.op == "rope":
        q, k = operands.q.unflatten(1, (-1, HEAD_DIM)), operands.k.unflatten(1, (-1, HEAD_DIM))  # type: ignore[no-untyped-call]
        ops.rope(operands.positions, q, k, operands.cache, True)
        result = x
    elif form.op.startswith("silu"):
        if form.out == "same":
            result = ops.silu_mul(x, *form.activation)
        else:
            result = ops.silu_mul_quant(x, *form.activation, quantised_dtype(form))
    elif form.op == "row_quant":
        result = ops.row_quant(x, quantised_dtype(form))
    elif form.out == "same":
        result = ops.rms_norm(x, operands.weight, operands.residual, EPSILON)
    else:
        dtype = quantised_dtype(form)
        result = ops.rms_norm_quant(x, operands.weight, operands.residual, EPSILON, dtype)
    return result


def reference(form: Form, operands: Operands, *, gold: bool) -> Tensor:
    """Compute a form in plain torch.

    Args:
        form: which operation.
        operands: changed in place where the op does so.
        gold: in fp64 without quantisation, instead of as the op defines it.

    Returns:
        [M, N] fp64: gold, or the (dequantised) reference.
    """
    wide = torch.float64 if gold else torch.bfloat16
    x = operands.x.to(wide, copy=True)
    if form.op == "rope":
        assert operands.positions is not None
        assert operands.cache is not None
        heads = x.view(x.shape[0], -1, HEAD_DIM)
        rope.rope_ref(operands.positions, heads, None, operands.cache, True)
        return x.double()
    if form.op.startswith("silu"):
        y = silu_mul.silu_mul_ref(x, *form.activation)
    elif form.op == "row_quant":
        y = x
    else:
        weight = None if operands.weight is None else operands.weight.to(wide)
        residual = None if operands.residual is None else operands.residual.to(wide, copy=True)
        y = rms_norm.rms_norm_ref(x, weight, residual, EPSILON)
    if gold or form.out == "same":
        return y.double()
    q, scales = row_quant.quantize_rows_ref(y, quantised_dtype(form))
    return q.double() * scales.double()


def why_wrong(form: Form, N: int, prepare: Prepare, M: int = 333) -> str | None:
    """Hold a kernel to the budget: twice the reference's error and one rounding.

    Args:
        form: which operation.
        N: a width.
        prepare: the kernel.
        M: tokens.

    Returns:
        A reason, or None where it is right.
    """
    operands = make_operands(form, N, M)
    gold = reference(form, operands, gold=True)
    error = (reference(form, operands, gold=False) - gold).abs().max().item()
    budget = 2 * (error + torch.finfo(torch.bfloat16).eps * gold.abs().max().item())
    result = prepare(form, [operands])(0)
    y = result.double() if isinstance(result, Tensor) else dequantised(*result)
    found = (y - gold).abs().max().item()
    return None if found <= budget else f"error {found:.3e} is above the budget {budget:.3e}"


def dequantised(q: Tensor, scales: Tensor) -> Tensor:
    """Return 8-bit values times their scales in fp64."""
    return q.double() * scales.double().view(-1, 1)
