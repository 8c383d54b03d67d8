"""Bytes and FLOPs of our ops, each by a formula over the arguments of `torch.ops.taut.<op>`.

Bytes are those a call cannot avoid: every operand read once, every result written once, of a table
(RoPE's angles) only the rows that are looked up. FLOPs follow :class:`~.work.Work`:

- products: 2·M·N·K; scales, zero points and bias are not counted (they are O(M·N) beside it)
- RMSNorm, a row element: square, sum, times 1/rms, times weight: 4 (3 without weight), residual +1
- SiLU·mul, an output: sigmoid, times gate, times up: 3; alpha, beta and the three clamps 1 each
- quantisation of a row, an element: magnitude, maximum, scaling: 3; with a given scale 1
- RoPE, a rotated element: two products and a sum: 3
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from taut_bench.instruments.attention_work import (
    ATTENTION_WORK,
    cache_write_tables,
    paged_decode_tables,
)
from taut_bench.instruments.loss_work import LOSS_WORK
from taut_bench.instruments.primitive_work import PRIMITIVE_WORK
from taut_bench.instruments.training_work import TRAINING_WORK, rope_table
from taut_bench.instruments.work import Arguments, Work, nbytes

_DYNAMIC_QUANT_FLOPS = 3
_STATIC_QUANT_FLOPS = 1


def _gemm(M: int, N: int, K: int, read: int, out: torch.dtype) -> Work:
    return Work(2 * M * N * K, read, M * N * out.itemsize)


def _w4a16_gemm(call: Arguments) -> Work:
    (M, K), N = call.x.shape, 16 * call.qweight.shape[0]
    return _gemm(
        M, N, K, nbytes(call.x, call.qweight, call.scales, call.zeros, call.bias), call.x.dtype
    )


def _w4a16_gemm_cpu(call: Arguments) -> Work:
    (M, K), N = call.x.shape, call.scales_and_zeros.shape[1]
    return _gemm(
        M, N, K, nbytes(call.x, call.qweight_cpu, call.scales_and_zeros, call.bias), call.x.dtype
    )


def _int8_linear_cpu(call: Arguments) -> Work:
    (M, K), N = call.x.shape, call.weight_scale.shape[0]
    moved = nbytes(call.x, call.weight, call.weight_scale, call.sums, call.bias)
    return _gemm(M, N, K, moved, call.x.dtype)


def _weight_only_linear_cpu(call: Arguments) -> Work:
    M, K = call.x.shape
    moved = nbytes(call.x, call.weight, call.scale, call.zero, call.bias)
    return _gemm(M, call.N, K, moved, call.x.dtype)


def _int8_gemm_cpu(call: Arguments) -> Work:
    (M, K), N = call.x_q.shape, call.weight.shape[0]
    return _gemm(
        M,
        N,
        K,
        nbytes(call.x_q, call.weight, call.x_scale, call.weight_scale, call.azp, call.bias),
        call.out_dtype,
    )


def _w8a8_gemm(call: Arguments) -> Work:
    (M, K), N = call.x.shape, call.weight.shape[0]
    read = nbytes(
        call.x, call.weight, call.x_scale, call.weight_scale, call.azp_adj, call.azp, call.bias
    )
    return _gemm(M, N, K, read, call.out_dtype)


def _fp8_gemm(call: Arguments) -> Work:
    (M, K), N = call.x.shape, call.weight.shape[0]
    return _gemm(
        M,
        N,
        K,
        nbytes(call.x, call.weight, call.x_scale, call.weight_scale, call.bias),
        call.out_dtype,
    )


def _norm(x: Tensor, weight: Tensor | None, residual: Tensor | None) -> Work:
    per_element = 3 + (weight is not None) + (residual is not None)
    # The residual is read and replaced by the sum.
    return Work(per_element * x.numel(), nbytes(x, weight, residual), nbytes(residual))


def _rms_norm(call: Arguments) -> Work:
    return _norm(call.x, call.weight, call.residual) + Work(written=nbytes(call.x))


def _rms_norm_quant(call: Arguments) -> Work:
    return _norm(call.x, call.weight, call.residual) + _row_quant(
        call.x.shape[0], call.x.shape[1], call.dtype
    )


def _rms_norm_static_quant(call: Arguments) -> Work:
    return _norm(call.x, call.weight, call.residual) + _static_quant(call.x.numel(), call.scale)


def _row_quant(M: int, N: int, dtype: torch.dtype) -> Work:
    return Work(_DYNAMIC_QUANT_FLOPS * M * N, 0, M * N * dtype.itemsize + 4 * M)


def _static_quant(elements: int, scale: Tensor) -> Work:
    return Work(_STATIC_QUANT_FLOPS * elements, nbytes(scale), elements)


def _activation(x: Tensor, alpha: float, beta: float, limit: float | None) -> Work:
    per_output = 3 + (alpha != 1.0) + (beta != 0.0) + 3 * (limit is not None)
    return Work(per_output * x.numel() // 2, nbytes(x))


def _silu_mul(call: Arguments) -> Work:
    return _activation(call.x, call.alpha, call.beta, call.limit) + Work(
        written=nbytes(call.x) // 2
    )


def _silu_mul_quant(call: Arguments) -> Work:
    return _activation(call.x, call.alpha, call.beta, call.limit) + _row_quant(
        call.x.shape[0], call.x.shape[1] // 2, call.dtype
    )


def _silu_mul_static_quant(call: Arguments) -> Work:
    return _activation(call.x, call.alpha, call.beta, call.limit) + _static_quant(
        call.x.numel() // 2, call.scale
    )


def _row_quant_alone(call: Arguments) -> Work:
    return Work(read=nbytes(call.x)) + _row_quant(call.x.shape[0], call.x.shape[1], call.dtype)


def _rope(call: Arguments) -> Work:
    T, rotated = call.positions.shape[0], call.cos_sin_cache.shape[1]
    heads = call.q.shape[1] + (0 if call.k is None else call.k.shape[1])
    elements = T * heads * rotated
    angles = T * rotated * call.cos_sin_cache.element_size()
    turned = elements * call.q.element_size()
    return Work(3 * elements, turned + angles + nbytes(call.positions), turned)


def _rope_apart(call: Arguments) -> Work:
    turned = _rope(call)
    angles = (
        call.positions.shape[0] * call.cos_sin_cache.shape[1] * call.cos_sin_cache.element_size()
    )
    heads = nbytes(call.q, call.k)  # the columns that stay are copied
    return Work(turned.flops, heads + angles + nbytes(call.positions), heads)


OP_WORK: dict[str, Callable[[Arguments], Work]] = {
    "w4a16_gemm": _w4a16_gemm,
    "w4a16_gemm_cpu": _w4a16_gemm_cpu,
    "int8_gemm_cpu": _int8_gemm_cpu,
    "int8_linear_cpu": _int8_linear_cpu,
    "weight_only_linear_cpu": _weight_only_linear_cpu,
    "w8a8_gemm": _w8a8_gemm,
    "fp8_gemm": _fp8_gemm,
    "rms_norm": _rms_norm,
    "rms_norm_quant": _rms_norm_quant,
    "rms_norm_static_quant": _rms_norm_static_quant,
    "silu_mul": _silu_mul,
    "silu_mul_quant": _silu_mul_quant,
    "silu_mul_static_quant": _silu_mul_static_quant,
    "row_quant": _row_quant_alone,
    "rope": _rope,
    "rope_apart": _rope_apart,
    **ATTENTION_WORK,
    **LOSS_WORK,
    **PRIMITIVE_WORK,
    **TRAINING_WORK,
}
"""Name in `torch.ops.taut` → its work from a call's arguments."""


OP_TABLES: dict[str, Callable[[Arguments], dict[int, int]]] = {
    "cache_write": cache_write_tables,
    "paged_decode": paged_decode_tables,
    "rope": rope_table,
    "rope_apart": rope_table,
    "rope_train": rope_table,
}
"""Ops that look rows up → which of their tensors are tables, and the bytes of each they read."""
