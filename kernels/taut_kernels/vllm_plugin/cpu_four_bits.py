"""Which product multiplies 4-bit weights on this CPU: ours, compiled here, or ATen's.

Ours must give a known answer and be the faster one over decode and a prompt; the choice is made
once and kept (:mod:`.cpu_choice`).
"""

from __future__ import annotations

import logging
from functools import cache, partial

import torch

from taut_kernels.gemm.w4a16 import cpu as _torchs  # noqa: F401  defines its op
from taut_kernels.gemm.w4a16 import disk
from taut_kernels.gemm.weight_only import cpu_linear
from taut_kernels.vllm_plugin import cpu_choice, cpu_weight_speed

_logger = logging.getLogger(__name__)


@cache
def why_ours() -> str | None:
    """Say why our product serves 4-bit weights here, None where ATen's does."""
    if cpu_linear.why_not_here() is not None:
        return None
    reason = cpu_weight_speed.kept("int4", _measure)
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
    layer = cpu_weight_speed.MeasuredLayer(4)
    packed, columns = disk.pack_weight(layer.codes), layer.codes.shape[1]
    qweight, pairs = disk.repack_for_cpu(packed, layer.scale, None, columns)
    theirs, op = [qweight.clone() for _ in range(cpu_choice.COPIES)], torch.ops.taut.w4a16_gemm_cpu
    return layer.why_faster(
        "torch's int4 product",
        lambda x: [
            partial(op.default, x, one, pairs, None, cpu_weight_speed.GROUP) for one in theirs
        ],
    )
