"""Which product multiplies 4-bit weights on this CPU: ours, compiled here, or ATen's.

Ours must give a known answer and be the faster one over decode and a prompt; the choice is made
once and kept (:mod:`.cpu_choice`).
"""

from __future__ import annotations

import logging
import math
from functools import cache, partial

import torch
from torch import Tensor

from taut_kernels.gemm.w4a16 import cpu as _torchs  # noqa: F401  defines its op
from taut_kernels.gemm.w4a16 import disk
from taut_kernels.gemm.weight_only import cpu_linear
from taut_kernels.launch import cpp_library
from taut_kernels.vllm_plugin import cpu_choice
from taut_kernels.vllm_plugin.cpu_choice import least_times

_logger = logging.getLogger(__name__)

_MEASURED = (3072, 576, 64)
"""Features and group of the product that is measured."""
_TOKENS = (1, 8, 64)
_WRONG = 2.0**-7
"""Of the largest result: one rounding to bf16 is a quarter of it."""


@cache
def why_ours() -> str | None:
    """Say why our product serves 4-bit weights here, None where ATen's does."""
    if cpu_linear.why_not_here() is not None:
        return None
    isa = cpu_linear.best_isa().name
    known = isa, torch.__version__, cpp_library.text_of(cpu_linear.SOURCE)
    reason = cpu_choice.kept("int4", known, _measure)
    if reason is not None:
        _logger.info("taut kernels: %s; W4A16 layers run on taut::%s", reason, cpu_linear.OP)
    return reason


def why_not_ours() -> str | None:
    """Say why torch's product serves 4-bit weights here, None where ours does."""
    if why_ours() is not None:
        return None
    why = cpu_linear.why_not_here() or f"taut::{cpu_linear.OP} is not faster on this CPU"
    return f"multiplied by torch's int4 product: {why}"


def _measure() -> str | None:
    """Compare both at few and at many tokens, CPU time of this thread."""
    isa, generator = cpu_linear.best_isa(), torch.Generator().manual_seed(0)
    N, K, group = _MEASURED
    codes = torch.randint(-8, 8, (N, K), generator=generator, dtype=torch.int8)
    scale = torch.rand(N, K // group, generator=generator, dtype=torch.float32).bfloat16()
    rows = torch.randn(max(_TOKENS), K, generator=generator, dtype=torch.float32).bfloat16()
    if not _is_right(rows, codes, scale, isa):
        return None
    weight, scales, _ = cpu_linear.pack(codes, scale, None, 4)
    qweight, pairs = disk.repack_for_cpu(disk.pack_weight(codes), scale, None, K)
    copies, stock, ratios = range(cpu_choice.COPIES), torch.ops.taut.w4a16_gemm_cpu.default, []
    own, others = [weight.clone() for _ in copies], [qweight.clone() for _ in copies]
    for M in _TOKENS:
        ours, theirs = least_times(
            [
                partial(cpu_linear.multiply, rows[:M], one, scales, None, None, N, isa)
                for one in own
            ],
            [partial(stock, rows[:M], one, pairs, None, group) for one in others],
        )
        ratios.append(theirs / ours)
    mean = math.prod(ratios) ** (1 / len(ratios))
    if mean < 1:
        return None
    told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    tokens = ", ".join(map(str, _TOKENS))
    return f"torch's int4 product takes {told} times as long at {tokens} tokens on this CPU"


def _is_right(rows: Tensor, codes: Tensor, scale: Tensor, isa: cpu_linear.Isa) -> bool:
    y = cpu_linear.multiply(
        rows, *cpu_linear.pack(codes, scale, None, 4), None, len(codes), isa
    ).float()
    exact = cpu_linear.weight_only_linear_cpu_ref(rows.float(), codes, scale)
    return bool(((y - exact).abs() <= _WRONG * exact.abs().max()).all())
