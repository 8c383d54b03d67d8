"""The part of :func:`.register` that imports vLLM."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.model_executor.kernels import linear as kernel_selection
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models import registry as model_registry
from vllm.platforms import current_platform
from vllm.v1.metrics.loggers import PrometheusStatLogger

from taut_kernels.vllm_plugin import (
    block_scaled_mm,
    compat,
    compiled_graph,
    decode_attention,
    fused_ops,
    gauges,
    known_answer,
    model_inspection,
    record,
    scaled_mm,
    selection,
    taut_format,
    token_tables,
)
from taut_kernels.vllm_plugin.amx import allow_amx
from taut_kernels.vllm_plugin.linear import TautW4A16LinearKernel, refusal, remark
from taut_kernels.vllm_plugin.scaled_mm import (
    TautFP8ScaledMMLinearKernel,
    TautInt8ScaledMMLinearKernel,
)

_logger = logging.getLogger(__name__)


def _make_our_log_lines_visible() -> None:
    # vLLM configures only its own logger, where the engine runs in the process of its caller after
    # plugins are loaded: its logger becomes our parent, whatever handlers and level it gets.
    ours = logging.getLogger("taut_kernels")
    if not ours.handlers:
        ours.parent = logging.getLogger("vllm")


def _why_no_eight_bits(kernel: Any) -> str | None:
    return block_scaled_mm.why_not_chosen(kernel) or scaled_mm.why_not_chosen(kernel)


def _replace_int8() -> None:
    """Put our int8 kernel first on a CPU where vLLM's multiplies wrongly, or slowly; say so."""
    from taut_kernels.vllm_plugin import cpu_int8

    if (reason := cpu_int8.why_ours()) is not None:
        ours = cpu_int8.TautCPUInt8ScaledMMLinearKernel
        compat.insert_scaled_mm_first(ours, kernel_selection, "INT8", "CPU")
        say = _logger.info if cpu_int8.why_not_stock() is None else _logger.warning
        say("taut kernels: %s; W8A8 layers run on %s", reason, cpu_int8.OURS)


def _insert_eight_bit_weights() -> None:
    """Offer W8A16 on a CPU, for which vLLM has no kernel."""
    from taut_kernels.vllm_plugin.cpu_eight_bits import TautCPUW8A16LinearKernel

    compat.insert_first(TautCPUW8A16LinearKernel, kernel_selection, ("CPU",))


def _refuse_wrong_int8(choices: list[selection.LayerChoice]) -> None:
    """Refuse a model whose int8 layers vLLM would multiply wrongly all the same.

    Raises:
        WrongAnswerError: our kernel was disabled, or filtered by a flag.
    """
    from taut_kernels.vllm_plugin import cpu_int8

    for choice in choices:
        if choice.kernel == cpu_int8.STOCK and (reason := cpu_int8.why_not_stock()) is not None:
            raise known_answer.WrongAnswerError(
                f"{choice.layer}: {reason}, and {cpu_int8.OURS}, which is exact, was not chosen: "
                "take it out of VLLM_DISABLED_KERNELS and leave out --linear-backend"
            )


def install(mode: str) -> None:
    """Insert our kernels, the audit and its gauges into this process.

    Args:
        mode: ``prefer`` or ``require``.

    Raises:
        IncompatibleVllmError: this vLLM lacks an extension point.
    """
    _make_our_log_lines_visible()
    allow_amx()
    if current_platform.is_cpu():
        _insert_eight_bit_weights()
    compat.insert_first(TautW4A16LinearKernel, kernel_selection)
    compat.insert_scaled_mm_first(TautInt8ScaledMMLinearKernel, kernel_selection, "INT8")
    compat.insert_scaled_mm_first(TautFP8ScaledMMLinearKernel, kernel_selection, "FP8")
    of_blocks = block_scaled_mm.TautFp8BlockScaledMMLinearKernel
    compat.insert_scaled_mm_first(of_blocks, kernel_selection, "FP8_BLOCK")
    taut_format.install()
    token_tables.install()
    if current_platform.is_cpu():
        _replace_int8()
        compiled_graph.allow_loading()
        model_inspection.inspect_here(model_registry)

    fused_ops.install(mode)
    decode_attention.install()

    def conclude(model: torch.nn.Module) -> None:
        choices = list(selection.audit(model, refusal, _why_no_eight_bits, remark))
        if current_platform.is_cpu():
            _refuse_wrong_int8(choices)
        ops = fused_ops.conclude(model, mode)
        attention = decode_attention.conclude(model, mode)
        parts = (fused_ops.summary(ops), decode_attention.summary(attention["attention"]))
        _logger.info("taut ops (%s): %s; %s", mode, *parts)
        ops |= attention
        known_answer.conclude()
        selection.conclude(choices, mode, ops)

    record.make_place()
    compat.after_model_load(BaseModelLoader, conclude)
    compat.after_engine_start(PrometheusStatLogger, gauges.publish_record)
