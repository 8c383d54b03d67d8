"""The tiles of Intel's AMX, which a process may use only once it has asked Linux for them."""

from __future__ import annotations

import torch


def allow_amx() -> bool:
    """Ask for the tiles, for this process and its threads.

    vLLM's attention on a CPU uses them where the CPU has them and leaves the asking to oneDNN,
    which runs a bf16 product first. Where every layer is quantised and ours, it does not, and the
    first attention ended the process (SIGILL; Xeon with AMX, vLLM 0.26, 2026-11-24).

    Returns:
        Whether they may be used; False on a CPU without them.
    """
    return bool(torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())
