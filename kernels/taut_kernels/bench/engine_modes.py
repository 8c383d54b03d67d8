"""The ways an engine of a benchmark can be started: stock, with our kernels, with fused ops too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODES = ("off", "prefer", "prefer+fused", "require", "require+fused")
"""``TAUT_KERNELS``, ``off`` is stock; ``+fused``: with what ``taut worker --fused-ops`` adds."""


def engine_options(mode: str, batches: Sequence[int]) -> dict[str, Any]:
    """Return what ``vllm.LLM`` of a mode is told beside the checkpoint.

    Args:
        mode: one of :data:`MODES`.
        batches: sequences at once, each captured as a CUDA graph.

    Raises:
        RuntimeError: this card has no fused ops in that mode.
    """
    import torch

    from taut_kernels.vllm_plugin import cache_key, fused_ops

    compilation: dict[str, Any] = {"cudagraph_capture_sizes": list(batches)}
    arguments: dict[str, Any] = {"compilation_config": compilation}
    kernels, _, fused = mode.partition("+")
    if kernels != "off":
        arguments["additional_config"] = {"taut": cache_key()}
    if fused:
        gpu = torch.cuda.get_device_name()
        if reason := fused_ops.why_not_fused_ops(gpu, kernels):
            raise RuntimeError(f"mode {mode}: {reason}")
        options = fused_ops.engine_options(gpu, kernels)
        compilation |= options["--compilation-config"]
        arguments["ir_op_priority"] = options["--ir-op-priority"]
    return arguments


def environment(mode: str, report: Path) -> dict[str, str]:
    """Return the environment variables of a process that becomes an engine.

    Args:
        mode: one of :data:`MODES`.
        report: where the plugin writes its record of the layers.
    """
    return os.environ | {
        "TAUT_KERNELS": mode.partition("+")[0],
        "TAUT_KERNELS_REPORT": str(report.resolve()),
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM forks where nobody has used CUDA, yet a fork after `is_available` fails.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1",
    }
