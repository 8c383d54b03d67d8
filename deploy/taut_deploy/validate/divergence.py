"""Differences between two next-token distributions, position by position.

A directory gives logits over the whole vocabulary and the Kullback-Leibler divergence is exact. A
server gives the log-probabilities of its most likely tokens only. Then the vocabulary is cut into
the tokens both sides know and one bucket for the rest; a divergence never grows when outcomes are
merged (data-processing inequality: Cover & Thomas, Elements of Information Theory, 2nd ed., §2.7),
so the result is a **lower bound**.

Numerics: logits come in the checkpoint's type and are widened before the log-softmax, which is
    taken in fp32 (fp64 for fp64 logits); sums run in fp64. Log-likelihoods kept in bf16 would be
    rounded to about three digits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_ROWS = 128  # positions per step: bounds the fp32 copies at rows × vocabulary
# fp32 log-probabilities sum to one within about this; a smaller tail is rounding, and a larger
# candidate tail only lowers the bound.
_TAIL_FLOOR = 1e-6


@dataclass(frozen=True, slots=True)
class FullDistribution:
    """Logits over the whole vocabulary.

    Args:
        logits: [positions, vocabulary], any floating type; position ``i`` predicts token ``i + 1``.
    """

    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class TopKDistribution:
    """Natural log-probabilities of some tokens at each position, the true token among them."""

    positions: tuple[Mapping[int, float], ...]


Distribution = FullDistribution | TopKDistribution


@dataclass(frozen=True, slots=True)
class Comparison:
    """Per-position results for one sequence or a stack of them; arrays [..., positions].

    ``*_nll`` are negative natural log-probabilities of the true token, ``kl`` is KL(baseline ‖
    candidate) in nats, ``*_top1`` the most likely token ids (lowest id on a tie, which bf16 logits
    do have).
    """

    baseline_nll: Floats
    candidate_nll: Floats
    kl: Floats
    baseline_top1: Ints
    candidate_top1: Ints
    kl_is_lower_bound: bool


def compare(baseline: Distribution, candidate: Distribution, targets: torch.Tensor) -> Comparison:
    """Compare two distributions over the same positions.

    Args:
        baseline: distribution P.
        candidate: distribution Q, over the same vocabulary.
        targets: [positions] int64, the true next tokens.

    Returns:
        Arrays of shape [positions].
    """
    if isinstance(baseline, FullDistribution) and isinstance(candidate, FullDistribution):
        return _compare_full(baseline.logits, candidate.logits, targets)
    if isinstance(baseline, FullDistribution):
        assert isinstance(candidate, TopKDistribution)  # noqa: S101 - narrows the type
        baseline = _known_tokens(baseline.logits, candidate)
    if isinstance(candidate, FullDistribution):
        candidate = _known_tokens(candidate.logits, baseline)
    return _compare_top_k(baseline, candidate, targets)


def token_logprobs(distribution: Distribution, targets: torch.Tensor) -> Floats:
    """Natural log-probability of the token that came at each position.

    Args:
        distribution: over ``len(targets)`` positions.
        targets: [positions] int64, the true next tokens.

    Returns:
        [positions] fp64.
    """
    if isinstance(distribution, TopKDistribution):
        rows = zip(distribution.positions, targets.tolist(), strict=True)
        return np.array([known[token] for known, token in rows])
    pieces = []
    for start in range(0, len(targets), _ROWS):
        rows_at = slice(start, start + _ROWS)
        logprobs = _log_softmax(distribution.logits[rows_at])
        index = targets[rows_at, None].to(logprobs.device)
        pieces.append(logprobs.gather(1, index)[:, 0].cpu().double())
    found: Floats = torch.cat(pieces).numpy()
    return found


def top1(distribution: Distribution) -> Ints:
    """The most likely token at each position, the lowest id on a tie; [positions]."""
    if isinstance(distribution, TopKDistribution):
        return np.array([_most_likely(known) for known in distribution.positions])
    found: Ints = distribution.logits.argmax(-1).cpu().numpy()
    return found


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide, dim=-1)


def _compare_full(
    baseline: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor
) -> Comparison:
    pieces: list[tuple[torch.Tensor, ...]] = []
    for start in range(0, len(targets), _ROWS):
        rows = slice(start, start + _ROWS)
        log_p, log_q = _log_softmax(baseline[rows]), _log_softmax(candidate[rows])
        index = targets[rows, None].to(log_p.device)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64)
        pieces.append(
            (
                -log_p.gather(1, index)[:, 0],
                -log_q.gather(1, index)[:, 0],
                # Never negative in exact arithmetic; fp32 rounding reaches about -1e-7.
                kl.clamp_min(0.0),
                log_p.argmax(-1),
                log_q.argmax(-1),
            )
        )
    columns = [torch.cat(column).cpu() for column in zip(*pieces, strict=True)]
    nll_p, nll_q, kl_all = (column.double().numpy() for column in columns[:3])
    top_p, top_q = (column.numpy() for column in columns[3:])
    return Comparison(nll_p, nll_q, kl_all, top_p, top_q, kl_is_lower_bound=False)


def _known_tokens(logits: torch.Tensor, other: TopKDistribution) -> TopKDistribution:
    """Reduce a full distribution to the tokens the other side knows, plus its own first choice."""
    rows: list[Mapping[int, float]] = []
    for row, known in zip(logits, other.positions, strict=True):
        logprobs = _log_softmax(row)
        ids = sorted({*known, int(logprobs.argmax())})
        rows.append(dict(zip(ids, logprobs[ids].tolist(), strict=True)))
    return TopKDistribution(tuple(rows))


def _compare_top_k(
    baseline: TopKDistribution, candidate: TopKDistribution, targets: torch.Tensor
) -> Comparison:
    rows = list(zip(baseline.positions, candidate.positions, targets.tolist(), strict=True))
    return Comparison(
        baseline_nll=np.array([-p[token] for p, _, token in rows]),
        candidate_nll=np.array([-q[token] for _, q, token in rows]),
        kl=np.array([kl_lower_bound(p, q) for p, q, _ in rows]),
        baseline_top1=np.array([_most_likely(p) for p, _, _ in rows]),
        candidate_top1=np.array([_most_likely(q) for _, q, _ in rows]),
        kl_is_lower_bound=True,
    )


def _most_likely(logprobs: Mapping[int, float]) -> int:
    return min(logprobs, key=lambda token: (-logprobs[token], token))


def kl_lower_bound(baseline: Mapping[int, float], candidate: Mapping[int, float]) -> float:
    """KL over the tokens both sides know and one bucket for all others.

    Args:
        baseline: token id → natural log-probability under P, a subset of the vocabulary.
        candidate: likewise under Q.

    Returns:
        Nats, at least 0 and at most KL(P ‖ Q).
    """
    shared = baseline.keys() & candidate.keys()
    ordered = sorted(shared)  # a fixed order makes the sum reproducible
    total = math.fsum(
        math.exp(baseline[token]) * (baseline[token] - candidate[token]) for token in ordered
    )
    tail_p = 1.0 - math.fsum(math.exp(baseline[token]) for token in ordered)
    tail_q = 1.0 - math.fsum(math.exp(candidate[token]) for token in ordered)
    if tail_p > 0.0:
        total += tail_p * math.log(tail_p / max(tail_q, _TAIL_FLOOR))
    return max(total, 0.0)
