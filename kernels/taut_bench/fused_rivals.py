"""The published fused ops, each on the same operands: vLLM's, Liger's, quack's, torch.compile's."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from taut_bench.fused_cases import (
    EPSILON,
    HEAD_DIM,
    Call,
    Form,
    Operands,
    Prepare,
    Result,
    quantised_dtype,
    taut,
)
from taut_kernels.activation import silu_mul
from taut_kernels.norm import rms_norm
from taut_kernels.rope import op as rope
from taut_kernels.rowwise import row_quant


class UnavailableError(RuntimeError):
    """A rival cannot run here; the message says why."""


def imported(name: str) -> Any:
    """Import a module of a rival's, whose own libraries may be what is missing.

    Raises:
        UnavailableError: it cannot be imported, and why.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise UnavailableError(f"{name}: {error}") from error


def _buffers(form: Form, copies: Sequence[Operands]) -> list[tuple[Tensor, Tensor]]:
    """Allocate the outputs vLLM's ops write: values and, for quantised forms, scales."""
    dtype = torch.bfloat16 if form.out == "same" else quantised_dtype(form)
    buffers = []
    for operands in copies:
        M, columns = operands.x.shape
        N = columns // 2 if form.op.startswith("silu") else columns
        y = torch.empty(M, N, dtype=dtype, device="cuda")
        buffers.append((y, torch.empty(M, 1, dtype=torch.float32, device="cuda")))
    return buffers


def vllm(form: Form, copies: Sequence[Operands]) -> Call:
    """Prepare what stock vLLM runs: one fused op where it has one, else its two ops."""
    imported("vllm._custom_ops")
    ops = torch.ops._C
    buffers = _buffers(form, copies)
    if form.op in ("rope", "silu_mul") or form.out == "same":
        return _vllm_plain(form, copies, buffers)
    if form.op == "silu_mul_quant":
        return _vllm_silu_quant(form, copies, buffers)
    if form.op == "row_quant":
        return _vllm_row_quant(form, copies, buffers)

    def call(i: int) -> Result:
        (y, scales), o = buffers[i], copies[i]
        ops.rms_norm_dynamic_per_token_quant(y, o.x, o.weight, scales, EPSILON, None, o.residual)
        return y, scales

    return call


def _vllm_plain(
    form: Form, copies: Sequence[Operands], buffers: list[tuple[Tensor, Tensor]]
) -> Call:
    ops = torch.ops._C

    def call(i: int) -> Result:
        y, o = buffers[i][0], copies[i]
        if form.op == "rope":
            ops.rotary_embedding(o.positions, o.q, o.k, HEAD_DIM, o.cache, True)
            return o.x
        if form.op == "silu_mul":
            _vllm_activation(form, y, o.x)
        elif form.op == "rms_norm":
            ops.rms_norm(y, o.x, o.weight, EPSILON)
        else:
            ops.fused_add_rms_norm(o.x, o.residual, o.weight, EPSILON)
            return o.x
        return y

    return call


def _vllm_activation(form: Form, y: Tensor, x: Tensor) -> None:
    alpha, _, limit, _ = form.activation
    if form.gpt_oss:
        torch.ops._C.swigluoai_and_mul(y, x, alpha, limit)
    else:
        torch.ops._C.silu_and_mul(y, x)


def _vllm_silu_quant(
    form: Form, copies: Sequence[Operands], buffers: list[tuple[Tensor, Tensor]]
) -> Call:
    quantise = _vllm_quantisation(form)
    middles = [torch.empty(y.shape, dtype=torch.bfloat16, device="cuda") for y, _ in buffers]

    def call(i: int) -> Result:
        (y, scales), o = buffers[i], copies[i]
        _vllm_activation(form, middles[i], o.x)
        quantise(y, middles[i], scales, None)
        return y, scales

    return call


def _vllm_quantisation(form: Form) -> Callable[..., None]:
    """Return vLLM's op of (values, input, scales, None) for a form's 8-bit type."""
    ops = torch.ops._C
    found: Callable[..., None] = (
        ops.dynamic_per_token_scaled_fp8_quant
        if form.out == "fp8"
        else ops.dynamic_scaled_int8_quant
    )
    return found


def _vllm_row_quant(
    form: Form, copies: Sequence[Operands], buffers: list[tuple[Tensor, Tensor]]
) -> Call:
    quantise = _vllm_quantisation(form)

    def call(i: int) -> Result:
        y, scales = buffers[i]
        quantise(y, copies[i].x, scales, None)
        return y, scales

    return call


def _keeping(call: Callable[[Operands], Result], copies: Sequence[Operands]) -> Call:
    """Keep each copy's result alive, as :func:`fused_cases.taut` does and for its reason."""
    kept: list[Result | None] = [None] * len(copies)

    def kept_call(i: int) -> Result:
        result = call(copies[i])
        kept[i] = result
        return result

    return kept_call


def liger(form: Form, copies: Sequence[Operands]) -> Call:
    """Prepare Liger's forward; it has no quantised forms, and its rope has its own layout."""
    if form.out != "same" or form.op == "rope" or form.gpt_oss:
        raise UnavailableError("Liger has no such op")
    if form.op == "silu_mul":
        forward = imported("liger_kernel.ops.swiglu").swiglu_fused_gate_up_forward
        return _keeping(lambda o: forward(o.x)[1], copies)
    if form.op == "rms_norm":
        forward = imported("liger_kernel.ops.rms_norm").rms_norm_forward
        return _keeping(lambda o: forward(o.x, o.weight, EPSILON, 0.0, "llama", True)[0], copies)
    forward = imported("liger_kernel.ops.fused_add_rms_norm").fused_add_rms_norm_forward
    return _keeping(lambda o: forward(o.x, o.residual, o.weight, EPSILON, 0.0, "llama")[0], copies)


def quack(form: Form, copies: Sequence[Operands]) -> Call:
    """Prepare quack's norm, which writes the sum beside its input, not over it."""
    if form.out != "same" or not form.op.endswith("rms_norm"):
        raise UnavailableError("quack has no such op")
    forward = imported("quack.rmsnorm").rmsnorm_fwd
    return _keeping(lambda o: forward(o.x, o.weight, residual=o.residual, eps=EPSILON)[0], copies)


@functools.cache
def _compiled(name: str) -> Callable[..., Any]:
    functions: dict[str, Callable[..., Any]] = {
        "rms_norm": rms_norm.rms_norm_ref,
        "rms_norm_quant": rms_norm.rms_norm_quant_ref,
        "silu_mul": silu_mul.silu_mul_ref,
        "silu_mul_quant": silu_mul.silu_mul_quant_ref,
        "row_quant": row_quant.quantize_rows_ref,
        "rope": rope.rope_ref,
    }
    return torch.compile(functions[name], dynamic=False)


def torch_compile(form: Form, copies: Sequence[Operands]) -> Call:
    """Prepare torch.compile of our references, shapes fixed."""
    function = _compiled(form.op.removeprefix("add_"))
    dtype = () if form.out == "same" else (quantised_dtype(form),)

    def call(o: Operands) -> Result:
        result: Result
        if form.op == "rope":
            q, k = o.q.unflatten(1, (-1, HEAD_DIM)), o.k.unflatten(1, (-1, HEAD_DIM))  # type: ignore[no-untyped-call]
            function(o.positions, q, k, o.cache, True)
            result = o.x
        elif form.op.startswith("silu"):
            result = function(o.x, *form.activation, *dtype)
        elif form.op == "row_quant":
            result = function(o.x, *dtype)
        else:
            result = function(o.x, o.weight, o.residual, EPSILON, *dtype)
        return result

    return _keeping(call, copies)


PREPARE: dict[str, Prepare] = {
    "taut": taut,
    "vLLM": vllm,
    "Liger": liger,
    "quack": quack,
    "torch.compile": torch_compile,
}
