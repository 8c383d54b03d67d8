"""How many threads torch uses, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def single_thread() -> Iterator[None]:
    """Run the block on one thread.

    Rounding is thousands of small operations in a row; on two threads each waits for the other at a
    barrier, and on a busy machine for the neighbour's time slice too (deploy/README.md, "Measured
    facts").
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
