"""Scales that several weights share."""

import torch


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
