"""A process of a run that ends with the run."""

import multiprocessing
import os
import threading
from collections.abc import Callable


def end_with_parent() -> None:
    """Let this process end when its parent does: a killed run leaves none that still writes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.join,), daemon=True).start()


def _end_after(parent_ended: Callable[[], None]) -> None:
    parent_ended()
    os._exit(1)
