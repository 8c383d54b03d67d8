"""Has OpenMP's threads sleep while they wait for each other, in this process alone.

libgomp has them spin for some milliseconds. Where other work shares the cores, a thread that spins
keeps the one that it waits for from running: SmolLM2 and its W8A8 took 6 to 13 CPU seconds for a
sequence of 256 tokens on two busy cores that take 1.3 with sleeping threads.
"""

import importlib
import os
from collections.abc import Callable

_POLICY = "OMP_WAIT_POLICY"
_CHOICES = (_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def load_torch(load: Callable[[], object] = lambda: importlib.import_module("torch")) -> None:
    """Import torch, whose libgomp reads its settings at that moment.

    The environment is as before afterwards: workers that this process starts serve with the
    threads they were tuned for. What a user has chosen stays.

    Args:
        load: imports it; without effect where that has happened.
    """
    if any(os.environ.get(name) for name in _CHOICES):
        load()
        return
    os.environ[_POLICY] = "passive"
    try:
        load()
    finally:
        del os.environ[_POLICY]
