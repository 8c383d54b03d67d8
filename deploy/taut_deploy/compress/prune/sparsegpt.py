"""SparseGPT: remove weights one input channel at a time, the others make up for each.

Source: SparseGPT, arXiv:2301.00774, §3.2 (columns in order, the inverse Hessian's Cholesky factor)
and §3.3 (the mask is chosen block by block, from weights already corrected). Rounding in the same
pass (§3.5) is left out: refitting the weights that stay and a masked GPTQ after it lose less.
"""

import torch

from taut_deploy.compress.prune.patterns import Pattern, keep_highest, require_fit
from taut_deploy.compress.quantize.gptq import Feedback

_BLOCK = 128


def prune_weight(
    weight: torch.Tensor, feedback: Feedback, pattern: Pattern
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose what goes and correct what stays.

    Args:
        weight: [N, K] fp32.
        feedback: of its input, channels in their own order.
        pattern: n:m, or a share of every block of 128 columns.

    Returns:
        The new weight [N, K], zero where pruned, and the mask [N, K], True where kept.

    Raises:
        ValueError: the pattern's runs do not divide K.
    """
    k = weight.shape[1]
    require_fit(pattern, k)
    factor = feedback.factor
    remaining = torch.where(feedback.dead, torch.zeros_like(weight), weight)
    mask = torch.zeros_like(weight, dtype=torch.bool)
    step = _BLOCK if pattern.run is None else pattern.run * max(1, _BLOCK // pattern.run)
    for start in range(0, k, step):
        stop = min(start + step, k)
        errors = torch.zeros_like(remaining[:, start:stop])
        for i in range(start, stop):
            if pattern.run is None and i == start:
                mask[:, start:stop] = _choose(remaining[:, start:stop], factor, start, pattern)
            elif pattern.run is not None and i % pattern.run == 0:
                run = slice(i, i + pattern.run)
                mask[:, run] = _choose(remaining[:, run], factor, i, pattern)
            value = remaining[:, i]
            kept = value * mask[:, i]
            error = (value - kept) / factor[i, i]
            remaining[:, i] = kept
            remaining[:, i + 1 : stop].addr_(error, factor[i, i + 1 : stop], alpha=-1)
            errors[:, i - start] = error
        remaining[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    return remaining, mask


def _choose(
    values: torch.Tensor, factor: torch.Tensor, start: int, pattern: Pattern
) -> torch.Tensor:
    """Keep what would cost most to remove: ``w² / [H⁻¹]ᵢᵢ`` with the factor's diagonal."""
    diagonal = factor.diagonal()[start : start + values.shape[1]]
    scores = (values / diagonal).square()
    if pattern.run is not None:
        return keep_highest(scores, pattern)
    # All rows of a block compete, as in the paper: rows that matter more keep more.
    return keep_highest(scores.reshape(1, -1), pattern).view_as(values)
