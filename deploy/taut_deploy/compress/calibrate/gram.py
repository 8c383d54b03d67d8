"""``x xᵀ`` of inputs summed up: its upper half alone, in bands of rows that threads share."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial

import torch

_BANDS = 8
_LEAST_BAND = 256
"""Rows; products of fewer do not use a core's registers."""


def add_gram(total: torch.Tensor, rows: torch.Tensor, pool: Executor | None = None) -> None:
    """Add ``xᵀ x`` to a sum, on and over the diagonal of its bands.

    Args:
        total: [K, K] fp32, on the device of its input; :func:`mirror` makes it whole.
        rows: [T, K] fp32.
        pool: whose threads share the bands; None to take one after the other.
    """
    add = partial(_add, total, rows)
    deque((map if pool is None else pool.map)(add, _bands(total.shape[0])), maxlen=0)


def mirror(total: torch.Tensor) -> None:
    """Fill what lies under the bands of a sum [K, K]."""
    for band in _bands(total.shape[0]):
        total[band.stop :, band] = total[band, band.stop :].T


def _bands(k: int) -> Iterator[slice]:
    step = max(_LEAST_BAND, -(-k // _BANDS))
    return (slice(start, min(start + step, k)) for start in range(0, k, step))


@torch.inference_mode()
def _add(total: torch.Tensor, rows: torch.Tensor, band: slice) -> None:
    total[band, band.start :].addmm_(rows[:, band].T, rows[:, band.start :])
