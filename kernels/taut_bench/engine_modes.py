"""The ways an engine of a benchmark can be started: stock, with our kernels, with fused ops too."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from taut_kernels.vllm_plugin import selfcheck

MODES = (
    "off",
    *(
        f"{kernels}{parts}"
        for kernels in ("prefer", "require")
        for parts in ("", "+fused", "+attention", "+fused+attention")
    ),
)
"""``TAUT_KERNELS``, ``off`` is stock; ``+fused`` and ``+attention``: with what ``taut worker
--fused-ops`` and ``--decode-attention`` add."""
HUMMING = "humming"
"""Stock vLLM told to multiply by Humming's kernels, which 0.26 takes only where it is told to, and
0.32 by itself on Hopper where Machete takes no layer."""


def engine_options(mode: str, batches: Sequence[int]) -> dict[str, Any]:
    """Return what ``vllm.LLM`` of a mode is told beside the checkpoint.

    Args:
        mode: one of :data:`MODES`, or :data:`HUMMING`.
        batches: sequences at once, each captured as a CUDA graph.

    Raises:
        RuntimeError: this card has no fused ops, or no decode attention, in that mode.
    """
    import torch

    from taut_kernels.launch import measured_here
    from taut_kernels.vllm_plugin import cache_key, decode_attention, fused_ops

    compilation: dict[str, Any] = {"cudagraph_capture_sizes": list(batches)}
    arguments: dict[str, Any] = {"compilation_config": compilation}
    kernels, *parts = mode.split("+")
    if kernels == HUMMING:
        arguments["linear_backend"] = "humming"
    elif kernels != "off":
        arguments["additional_config"] = {"taut": cache_key(measured_here.named())}
    gpu = torch.cuda.get_device_name() if parts else None
    if "fused" in parts:
        if reason := fused_ops.why_not_fused_ops(gpu, kernels):
            raise RuntimeError(f"mode {mode}: {reason}")
        options = fused_ops.engine_options(gpu, kernels)
        compilation |= options["--compilation-config"]
        arguments["ir_op_priority"] = options["--ir-op-priority"]
    if "attention" in parts:
        if reason := decode_attention.why_not_used(gpu, kernels):
            raise RuntimeError(f"mode {mode}: {reason}")
        backend = decode_attention.engine_options(gpu, kernels)["--attention-backend"]
        arguments["attention_backend"] = backend
    return arguments


def unready(modes: Sequence[str]) -> bool:
    """Say in one line why vLLM would not run the kernels a mode asks for.

    vLLM goes on without a plugin that it does not find: stock would be measured under our name.

    Args:
        modes: each one of :data:`MODES`, or :data:`HUMMING`.

    Returns:
        Whether it would not.
    """
    reason = None
    if not {*modes} <= {"off", HUMMING}:
        reason = selfcheck.why_not_ready(os.environ.get("VLLM_PLUGINS"))
    if reason is None and HUMMING in modes and find_spec("humming") is None:
        reason = "mode humming: humming-kernels is not installed"
    if reason is not None:
        sys.stderr.write(f"error: {reason}\n")
    return reason is not None


def environment(mode: str, report: Path) -> dict[str, str]:
    """Return the environment variables of a process that becomes an engine.

    Args:
        mode: one of :data:`MODES`, or :data:`HUMMING`.
        report: where the plugin writes its record of the layers.
    """
    kernels = mode.partition("+")[0]
    return os.environ | {
        "TAUT_KERNELS": "off" if kernels == HUMMING else kernels,
        "TAUT_KERNELS_REPORT": str(report.resolve()),
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM forks where nobody has used CUDA, yet a fork after `is_available` fails.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1",
    }
