"""What a process of ``--workers`` runs in a test instead of its own function.

A module by itself: a spawned process imports it by name, which it cannot do with a test.
"""

from __future__ import annotations

import os
import signal

from taut_deploy.compress import by_weights


def compress_or_die(index: int):
    """Do what :func:`by_weights._compress` does, but for block 2, which kills the process."""
    if index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return by_weights._processes[0].compress(index)
