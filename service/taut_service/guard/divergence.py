"""How far two variants are apart on the same text, from their ``prompt_logprobs``.

Both read the same tokens (teacher forcing), so one different choice does not spoil the rest. A
worker tells its top K and the text's own token at each place. KL is taken over the tokens that both
told and one bucket for all others: joining outcomes can only lower KL (data processing
inequality), so nothing is made up. Each place is clipped to a bound, a reading is a mean in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

LEAST_PROBABILITY = 1e-6
"""Of the bucket of all others: rounding may leave it 0 or less."""
ROUNDING = 0.01
"""What a log-probability may be above 0."""
Distribution = Mapping[int, float]
"""Token id → log-probability, of the top K and the text's own token."""


class UnreadableError(Exception):
    """A worker's answer has no log-probabilities for the text; ``str()`` says what is wrong."""


class NotFiniteError(UnreadableError):
    """A log-probability is NaN, infinite or above 0: the worker computes rubbish."""


class Place(NamedTuple):
    """What the baseline expects at a place, as every comparison with it needs it.

    Args:
        distribution: as it was read.
        top: the most probable token.
        terms: token, log-probability and probability of each that was told.
    """

    distribution: Distribution
    top: int
    terms: Sequence[tuple[int, float, float]]


Expected = Sequence[Place]


def expected(distributions: Iterable[Distribution]) -> list[Place]:
    """Prepare the baseline's reading: it is compared twice."""
    exp = math.exp
    return [
        Place(told, _top(told), [(token, log, exp(log)) for token, log in told.items()])
        for told in distributions
    ]


class Divergence(NamedTuple):
    """One reading.

    Args:
        kl: mean of clipped KL over the bound, in [0, 1].
        disagreement: share of places whose most probable tokens differ.
        first: the first such place, None without.
        tokens: places that were compared.
    """

    kl: float
    disagreement: float
    first: int | None
    tokens: int


FULL = 1.0
"""KL and disagreement of what cannot be compared because the variant is broken."""


def read_distributions(answer: Any, prompt: int, total: int) -> list[Distribution]:
    """Return the distributions at the places of the answer's tokens.

    Args:
        answer: parsed document of ``/v1/completions``.
        prompt: tokens before the first that is looked at.
        total: tokens that were sent.

    Raises:
        UnreadableError: the document is not what vLLM sends.
        NotFiniteError: a log-probability is not a number.
    """
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
    except (KeyError, IndexError, TypeError):
        entries = None
    if not isinstance(entries, list) or len(entries) != total:
        raise UnreadableError("the answer has no 'prompt_logprobs' with an entry for each token")
    return [_distribution(entry) for entry in entries[prompt:]]


def _distribution(entry: Any) -> Distribution:
    try:
        found = {int(token): float(told["logprob"]) for token, told in entry.items()}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise UnreadableError("an entry of 'prompt_logprobs' is not as vLLM writes it") from error
    if not found:
        raise UnreadableError("an entry of 'prompt_logprobs' is empty")
    check_finite(found.values())
    return found


def check_finite(logs: Collection[float]) -> None:
    """Insist on log-probabilities; there is at least one.

    Raises:
        NotFiniteError: one is not a number, or is above 0.
    """
    # vLLM writes -inf, which JSON lacks, as a very negative number. One that is not finite makes
    # the sum so, too.
    if not math.isfinite(sum(logs)) or max(logs) > ROUNDING:
        raise NotFiniteError("a log-probability is NaN, infinite or above 0")


def diverge(reference: Expected, other: Sequence[Distribution], kl_bound: float) -> Divergence:
    """Compare two variants place by place.

    Args:
        reference: the baseline's, prepared.
        other: as long, at least one place.
        kl_bound: nats; more than that at a place counts as that.
    """
    total, differing, first = 0.0, 0, None
    for place, (p, q) in enumerate(zip(reference, other, strict=True)):
        if p.distribution == q:
            continue
        total += min(kl_bound, coarse_kl(p, q))
        if not _is_top(p.top, q):
            differing += 1
            first = place if first is None else first
    places = len(reference)
    return Divergence(total / places / kl_bound, differing / places, first, places)


def joined(parts: Sequence[Divergence]) -> Divergence:
    """Return the reading of a text whose parts were read one after the other; at least one."""
    places = kl = differing = 0.0
    first = None
    for part in parts:
        if first is None and part.first is not None:
            first = int(places) + part.first
        places += part.tokens
        kl += part.kl * part.tokens
        differing += part.disagreement * part.tokens
    return Divergence(kl / places, differing / places, first, int(places))


def coarse_kl(p: Place, q: Distribution) -> float:
    """Return KL(p || q) in nats over the tokens that both told and the bucket of all others."""
    shared_p = shared_q = kl = 0.0
    exp = math.exp
    for token, log_p, probability in p.terms:
        if token in q:
            log_q = q[token]
            shared_p += probability
            shared_q += exp(log_q)
            kl += probability * (log_p - log_q)
    # Comparisons: calls of max() would take as long as all logarithms here.
    rest_p, rest_q = 1.0 - shared_p, 1.0 - shared_q
    if rest_p < LEAST_PROBABILITY:
        rest_p = LEAST_PROBABILITY
    if rest_q < LEAST_PROBABILITY:
        rest_q = LEAST_PROBABILITY
    kl += rest_p * math.log(rest_p / rest_q)
    return kl if kl > 0.0 else 0.0


def _top(distribution: Distribution) -> int:
    logs = [*distribution.values()]
    highest = max(logs)
    if logs.count(highest) == 1:
        return [*distribution][logs.index(highest)]
    # Equal ones: the smaller id, at both.
    return min(token for token, log in distribution.items() if log == highest)


def _is_top(token: int, distribution: Distribution) -> bool:
    """Whether :func:`_top` is this token, seldom asking it."""
    logs = [*distribution.values()]
    highest = max(logs)
    if distribution.get(token) != highest:
        return False
    return logs.count(highest) == 1 or _top(distribution) == token
