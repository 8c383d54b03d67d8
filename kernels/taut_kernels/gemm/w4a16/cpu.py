"""W4A16 GEMM on CPU: the product of :mod:`.op` over the CPU layout.

Not our arithmetic: the implementation is ATen's ``_weight_int4pack_mm_for_cpu`` (PyTorch, BSD-3),
named here because :func:`.op.w4a16_gemm_ref`, which dequantises the whole
weight on every call, is too slow to serve with. The reference stays the specification and the tests
hold this op to it.

Maths     y[m, n] = Σ_k x[m, k] · ((q[k, n] - 8) · s[k // G, n] + z[k // G, n]) + bias[n], z = (8 -
          zero_point) · s
Shapes    x [M, K] bf16, contiguous   qweight_cpu [N, K/2] uint8, opaque   scales_and_zeros [K/G, N,
          2] bf16 bias [N] bf16 or None   →   y [M, N] bf16
Packing   :func:`.disk.repack_for_cpu`; depends on the vector width of the machine,
          never stored
Numerics  fp32 dequantisation and accumulation, one rounding at the store, a second one where there
          is a bias. z is rounded to bf16 once at repacking: exact for zero points within 2 of 8,
          else off by at most 2⁻⁹ of itself.
Limits    bf16 (in fp16 and fp32 ATen runs scalar code, 40 times slower); N % 16 == 0; G in {32, 64,
          128, 256}; forward only
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taut_kernels.gemm.w4a16 import disk as formats
from taut_kernels.launch.op_registration import register_op

OP = "w4a16_gemm_cpu"


def _aten_w4a16_gemm(
    x: Tensor, qweight_cpu: Tensor, scales_and_zeros: Tensor, bias: Tensor | None, group_size: int
) -> Tensor:
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.contiguous(), qweight_cpu, group_size, scales_and_zeros
    )
    return y if bias is None else y.add_(bias)


def _fake_w4a16_gemm_cpu(
    x: Tensor, qweight_cpu: Tensor, scales_and_zeros: Tensor, *_: Any
) -> Tensor:
    return x.new_empty((x.shape[0], scales_and_zeros.shape[1]))


_SCHEMA = (
    f"taut::{OP}(Tensor x, Tensor qweight_cpu, Tensor scales_and_zeros, Tensor? bias, int "
    "group_size) -> Tensor"
)
register_op(_SCHEMA, _aten_w4a16_gemm, None, _fake_w4a16_gemm_cpu)


def why_not_supported(N: int, K: int, group_size: int, dtype: torch.dtype) -> str | None:
    """Say why this op does not apply to a layer; arguments as of :func:`.op.why_not_supported`."""
    if dtype is not torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"on CPU activations must be bfloat16, got {name} (serve with --dtype bfloat16)"
    if N % 16:
        return f"on CPU output features must be a multiple of 16, got {N}"
    if formats.cpu_group_size(K, K if group_size == -1 else group_size) is None:
        return f"on CPU no group of 32, 64, 128 or 256 fits {K} input features at {group_size}"
    return None


def w4a16_gemm_cpu(
    x: Tensor, qweight_cpu: Tensor, scales_and_zeros: Tensor, *, bias: Tensor | None = None
) -> Tensor:
    """Multiply activations by 4-bit weights on CPU.

    Args:
        x: [..., K] bf16 on CPU, any strides.
        qweight_cpu: [N, K/2] uint8 from :func:`.disk.repack_for_cpu`.
        scales_and_zeros: [K/G, N, 2] bf16, contiguous, likewise.
        bias: [N] bf16 or None.

    Returns:
        [..., N] bf16.

    Raises:
        ValueError: a shape, dtype, device or layout the contract does not allow; names the
            argument.
    """
    if x.dim() == 0 or x.device.type != "cpu" or x.dtype is not torch.bfloat16:
        raise ValueError(f"x must be [..., K] bfloat16 on CPU, got {x.dtype} on {x.device}")
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        raise ValueError("w4a16_gemm_cpu is forward only: call it under torch.no_grad()")
    K = x.shape[-1]
    if scales_and_zeros.dim() != 3 or scales_and_zeros.dtype is not x.dtype:
        raise ValueError("scales_and_zeros must be [K/G, N, 2] bfloat16")
    groups, N = scales_and_zeros.shape[:2]
    group_size = K // groups if groups and K % groups == 0 else 0
    if reason := why_not_supported(N, K, group_size, x.dtype):
        raise ValueError(f"scales_and_zeros: {reason}")
    if tuple(qweight_cpu.shape) != (N, K // 2) or qweight_cpu.dtype is not torch.uint8:
        raise ValueError(
            f"qweight_cpu must be uint8 {(N, K // 2)}, "
            f"got {qweight_cpu.dtype} {tuple(qweight_cpu.shape)}"
        )
    if bias is not None and (tuple(bias.shape) != (N,) or bias.dtype is not x.dtype):
        raise ValueError(f"bias must be bfloat16 {(N,)}, got {bias.dtype} {tuple(bias.shape)}")
    operands = {"qweight_cpu": qweight_cpu, "scales_and_zeros": scales_and_zeros, "bias": bias}
    for name, tensor in operands.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} must be on cpu, got {tensor.device}")
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    y: Tensor = torch.ops.taut.w4a16_gemm_cpu(
        x.reshape(-1, K), qweight_cpu, scales_and_zeros, bias, group_size
    )
    return y.view(*x.shape[:-1], N)
