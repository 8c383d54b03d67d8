"""How reports name this machine and its card."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """Return the processor's model as Linux names it; elsewhere its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def gpu_name() -> str | None:
    """Return the first card's name, None without CUDA. Imports torch."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
