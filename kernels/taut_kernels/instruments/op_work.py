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
from typing import Any

import torch

from taut_kernels.instruments.attention_work import (
    ATTENTION_WORK,
    cache_write_tables,
    paged_decode_tables,
)
from taut_kernels.instruments.loss_work import LOSS_WORK
from taut_kernels.instruments.primitive_work import PRIMITIVE_WORK
from taut_kernels.instruments.training_work import TRAINING_WORK, rope_train_table
from taut_kernels.instruments.work import Work, nbytes

_DYNAMIC_QUANT_FLOPS = 3
_STATIC_QUANT_FLOPS = 1


def _gemm(M: int, N: int, K: int, read: int, out: torch.dtype) -> Work:
    return Work(2 * M * N * K, read, M * N * out.itemsize)


def _w4a16_gemm(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor,
    group_size: int,
) -> Work:
    del arrivals, group_size
    (M, K), N = x.shape, 16 * qweight.shape[0]
    return _gemm(M, N, K, nbytes(x, qweight, scales, zeros, bias), x.dtype)


def _w4a16_gemm_cpu(
    x: torch.Tensor,
    qweight_cpu: torch.Tensor,
    scales_and_zeros: torch.Tensor,
    bias: torch.Tensor | None,
    group_size: int,
) -> Work:
    del group_size
    (M, K), N = x.shape, scales_and_zeros.shape[1]
    return _gemm(M, N, K, nbytes(x, qweight_cpu, scales_and_zeros, bias), x.dtype)


def _int8_gemm_cpu(
    x_q: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    azp: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> Work:
    (M, K), N = x_q.shape, weight.shape[0]
    return _gemm(M, N, K, nbytes(x_q, weight, x_scale, weight_scale, azp, bias), out_dtype)


def _w8a8_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    azp_adj: torch.Tensor | None,
    azp: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> Work:
    del arrivals
    (M, K), N = x.shape, weight.shape[0]
    read = nbytes(x, weight, x_scale, weight_scale, azp_adj, azp, bias)
    return _gemm(M, N, K, read, out_dtype)


def _fp8_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> Work:
    del arrivals
    (M, K), N = x.shape, weight.shape[0]
    return _gemm(M, N, K, nbytes(x, weight, x_scale, weight_scale, bias), out_dtype)


def _norm(x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None) -> Work:
    per_element = 3 + (weight is not None) + (residual is not None)
    # The residual is read and replaced by the sum.
    return Work(per_element * x.numel(), nbytes(x, weight, residual), nbytes(residual))


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None, epsilon: float
) -> Work:
    del epsilon
    return _norm(x, weight, residual) + Work(written=nbytes(x))


def _rms_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    epsilon: float,
    dtype: torch.dtype,
) -> Work:
    del epsilon
    return _norm(x, weight, residual) + _row_quant(x.shape[0], x.shape[1], dtype)


def _rms_norm_static_quant(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    epsilon: float,
    scale: torch.Tensor,
) -> Work:
    del epsilon
    return _norm(x, weight, residual) + _static_quant(x.numel(), scale)


def _row_quant(M: int, N: int, dtype: torch.dtype) -> Work:
    return Work(_DYNAMIC_QUANT_FLOPS * M * N, 0, M * N * dtype.itemsize + 4 * M)


def _static_quant(elements: int, scale: torch.Tensor) -> Work:
    return Work(_STATIC_QUANT_FLOPS * elements, nbytes(scale), elements)


def _activation(x: torch.Tensor, alpha: float, beta: float, limit: float | None) -> Work:
    per_output = 3 + (alpha != 1.0) + (beta != 0.0) + 3 * (limit is not None)
    return Work(per_output * x.numel() // 2, nbytes(x))


def _silu_mul(
    x: torch.Tensor, alpha: float, beta: float, limit: float | None, interleaved: bool
) -> Work:
    del interleaved
    return _activation(x, alpha, beta, limit) + Work(written=nbytes(x) // 2)


def _silu_mul_quant(
    x: torch.Tensor,
    alpha: float,
    beta: float,
    limit: float | None,
    interleaved: bool,
    dtype: torch.dtype,
) -> Work:
    del interleaved
    return _activation(x, alpha, beta, limit) + _row_quant(x.shape[0], x.shape[1] // 2, dtype)


def _silu_mul_static_quant(
    x: torch.Tensor,
    alpha: float,
    beta: float,
    limit: float | None,
    interleaved: bool,
    scale: torch.Tensor,
) -> Work:
    del interleaved
    return _activation(x, alpha, beta, limit) + _static_quant(x.numel() // 2, scale)


def _row_quant_alone(x: torch.Tensor, dtype: torch.dtype) -> Work:
    return Work(read=nbytes(x)) + _row_quant(x.shape[0], x.shape[1], dtype)


def _rope(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    neox: bool,
) -> Work:
    del neox
    T, rotated = positions.shape[0], cos_sin_cache.shape[1]
    heads = q.shape[1] + (0 if k is None else k.shape[1])
    elements = T * heads * rotated
    angles = T * rotated * cos_sin_cache.element_size()
    turned = elements * q.element_size()
    return Work(3 * elements, turned + angles + nbytes(positions), turned)


def _rope_apart(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    neox: bool,
) -> Work:
    turned = _rope(positions, q, k, cos_sin_cache, neox)
    angles = positions.shape[0] * cos_sin_cache.shape[1] * cos_sin_cache.element_size()
    heads = nbytes(q, k)  # the columns that stay are copied
    return Work(turned.flops, heads + angles + nbytes(positions), heads)


OP_WORK: dict[str, Callable[..., Work]] = {
    "w4a16_gemm": _w4a16_gemm,
    "w4a16_gemm_cpu": _w4a16_gemm_cpu,
    "int8_gemm_cpu": _int8_gemm_cpu,
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
"""Name in `torch.ops.taut` → its work from the op's arguments."""


def _rope_table(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    neox: bool,
) -> dict[int, int]:
    del q, neox
    row = cos_sin_cache.shape[1] * cos_sin_cache.element_size()
    return {2 if k is None else 3: positions.shape[0] * row}


OP_TABLES: dict[str, Callable[..., dict[int, int]]] = {
    "cache_write": cache_write_tables,
    "paged_decode": paged_decode_tables,
    "rope": _rope_table,
    "rope_apart": _rope_table,
    "rope_train": rope_train_table,
}
"""Ops that look rows up → which of their tensors are tables, and the bytes of each they read."""


def work_of(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
    """Return the work of one call of an op of ours.

    Args:
        op: a key of :data:`OP_WORK`.
        args: as `torch.ops.taut.<op>` got them.
        kwargs: likewise.
    """
    return OP_WORK[op](*args, **kwargs)
