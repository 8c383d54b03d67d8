"""Whether both variants draw from their distributions alike: temperature, top-p and their like.

Teacher forcing does not see how a worker draws. Its answers show it: those drawn colder consist of
tokens that are more probable. So both variants' answers to one request are read by the baseline,
and their *surprise* is compared, the mean negative log-likelihood of a token. If both draw alike
the differences have mean 0, whatever clients ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from taut_service.guard.divergence import Distribution

WARMER, COLDER = "warmer", "colder"
SURPRISE_CLIP_NATS = 2.0
"""A larger difference between two answers counts as this."""


def leaves_to_worker(request: Mapping[str, Any]) -> bool:
    """Whether a request has the worker draw as it does by default."""
    return request.get("temperature") is None


def surprise(distributions: Sequence[Distribution], tokens: Sequence[int]) -> float | None:
    """Return the mean negative log-likelihood of a text's tokens, in nats.

    Args:
        distributions: at each place.
        tokens: that stand there, as many.

    Returns:
        None where a worker did not tell a token's, or there is none.
    """
    pairs = zip(distributions, tokens, strict=True)
    logs = [told[token] for told, token in pairs if token in told]
    return -sum(logs) / len(logs) if logs and len(logs) == len(tokens) else None


def drawn_apart(candidate: float, baseline: float) -> dict[str, float]:
    """Return the two bounded observations of the surprise of two answers."""
    apart = (candidate - baseline) / SURPRISE_CLIP_NATS
    apart = max(-1.0, min(1.0, apart))
    return {WARMER: apart, COLDER: -apart}
