"""Whether our int8 product beats vLLM's on this CPU; this module imports vLLM."""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import Tensor
from vllm import _custom_ops

from taut_kernels.gemm.scaled_mm import cpu_linear
from taut_kernels.launch import cpp_library
from taut_kernels.vllm_plugin import cpu_choice

_MEASURED = (3072, 576)
"""Features of the product that is measured."""
_FASTER_ONE, _SLOWER_MANY, _MANY = 0.9, 1.5, 64
"""Ours serves from nine tenths of vLLM's time at one token on, at most half more at 64 tokens."""


def why_faster() -> str | None:
    """Say by how much ours is faster, None where vLLM's stays; measures where nothing is kept."""
    known = os.environ.get("ONEDNN_MAX_CPU_ISA", ""), str(cpu_linear.has_vnni())
    return cpu_choice.kept("int8", (*known, cpp_library.text_of(cpu_linear.SOURCE)), _measure)


def _measure() -> str | None:
    one, many = (_times(M) for M in (1, _MANY))
    if one[0] > _FASTER_ONE * one[1] or many[0] > _SLOWER_MANY * many[1]:
        return None
    return f"vLLM's int8 product takes {one[1] / one[0]:.2f} times as long at one token on this CPU"


def _times(M: int) -> tuple[float, float]:
    """Measure a product of M rows, CPU time of this thread: ours and vLLM's, quantisation in it."""
    (N, K), generator = _MEASURED, torch.Generator().manual_seed(0)
    x = torch.randn(M, K, generator=generator, dtype=torch.float32).bfloat16()
    scale = torch.full((N, 1), 0.01, dtype=torch.float32)
    codes = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
    turned, flat, vnni = codes.t(), scale.reshape(-1), cpu_linear.has_vnni()

    def stock(handler: _custom_ops.CPUDNNLGEMMHandler) -> None:
        x_q, x_scale, zero = _custom_ops.onednn_scaled_int8_quant(x, None, None, True)
        y = torch.empty((M, N), dtype=x.dtype)
        _custom_ops.onednn_scaled_mm(handler, x_q, y, x_scale, zero, None, None)

    def ours(weight: Tensor, sums: Tensor) -> None:
        torch.ops.taut.int8_linear_cpu(x, weight, flat, sums, None, None, None, True, vnni)

    make = _custom_ops.create_onednn_scaled_mm
    copies = range(cpu_choice.COPIES)
    theirs = [partial(stock, make(turned, scale, x.dtype, True, False, 32)) for _ in copies]
    packed = [partial(ours, *cpu_linear.pack(codes)) for _ in copies]
    own, other = cpu_choice.least_times(packed, theirs)
    return own, other
