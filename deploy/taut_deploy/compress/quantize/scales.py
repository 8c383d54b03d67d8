"""Scales that several weights share, and rows at a time that do not."""

from collections.abc import Iterator

import torch

from taut_deploy.compress.threads import single_thread

# fp32 numbers that stay in a core's cache from one operation to the next.
_CACHED = 1 << 17


def row_slices(weight: torch.Tensor) -> Iterator[slice]:
    """Rows to work on at a time, on one thread; on a card all of them.

    A pass over a weight that is larger than the cache takes as long as memory does, and an
    operation's result as many new pages as the weight has. What fits is too small for threads,
    which would wait for each other after every operation.

    Args:
        weight: [N, K].
    """
    n, k = weight.shape
    if weight.is_cuda:
        yield slice(0, n)
        return
    step = max(1, _CACHED // max(1, k))
    with single_thread():
        for start in range(0, n, step):
            yield slice(start, start + step)


def expand(entries: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Repeat scales or zero points so that each weight has its own.

    Args:
        entries: [1], [N, 1], [N, G] or [blocks of rows, blocks of columns].
        shape: (N, K) of the weight; a last block may be cut.

    Returns:
        [N, K], or what broadcasts to it.
    """
    if entries.numel() == 1:
        return entries.reshape(1, 1)
    rows, columns = (-(-size // count) for size, count in zip(shape, entries.shape, strict=True))
    if entries.shape[0] != shape[0]:
        entries = entries.repeat_interleave(rows, 0)[: shape[0]]
    if entries.shape[1] not in (1, shape[1]):
        entries = entries.repeat_interleave(columns, 1)[:, : shape[1]]
    return entries
