"""Which `ptxas` assembles a kernel.

Triton 3.6, of vLLM 0.26's torch, brings two and gives sm_90 the older (12.8); later Tritons give it
the newer. From 12.9 on a warp that scales a product's sums lets the other warps begin theirs
between its instructions: kernels/README.md, "Measured facts", has what that is worth.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from triton import knobs

Choice = Callable[[], AbstractContextManager[None]]
"""Makes what Triton compiles in."""
_LOCK = threading.RLock()
"""The choice is the process's: one thread makes it at a time."""


@contextmanager
def newest_ptxas() -> Iterator[None]:
    """Let Triton assemble with the newer `ptxas` it brings, where the same drivers load its code.

    Other threads that compile meanwhile get it, too. A path of the user's own
    (``TRITON_PTXAS_PATH``) stays.
    """
    with _LOCK:
        nvidia = knobs.nvidia
        if "TRITON_PTXAS_PATH" in os.environ or not _newer():
            yield
            return
        path = nvidia.ptxas_blackwell.path
        with nvidia.scope():
            nvidia.ptxas = path
            yield


def _newer() -> bool:
    """Say whether the one Triton brings for sm_100 is newer, of the same major version."""
    usual, other = (
        tuple(int(part) for part in tool.version.split("."))
        for tool in (knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell)
    )
    return usual[0] == other[0] and usual < other
