"""Reads log-probabilities out of a worker's answer and compares them, a few places at a time.

Such an answer has hundreds of kilobytes, most of them about the prompt, which nobody looks at. A
parser holds the interpreter until it is done, in a thread of its own as well, and every stream
would wait. So the bytes are cut between two tokens' entries, only those of the answer's tokens are
parsed, and clients have their turn after every :data:`PLACES` of them. Where the cuts are not what
they should be (another layout, a token that looks like one), the document is parsed whole.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from taut_service.guard.divergence import (
    Distribution,
    Divergence,
    check_finite,
    diverge,
    joined,
    read_distributions,
)

PLACES = 64
"""Tokens read, or compared, in one turn of the event loop: a quarter of a millisecond."""
SMALL_BYTES = 32 * 1024
"""JSON up to this size is parsed in less time than a thread takes to be told."""
# The first token has no entry.
_FIRST, _NEXT, _END = b'"prompt_logprobs":[null,{"', b'}},{"', b"}}]"


async def parse(data: bytes) -> Any:
    """Parse a document.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested too deeply.
    """
    if len(data) <= SMALL_BYTES:
        return json.loads(data)
    return await asyncio.to_thread(json.loads, data)


async def distributions_of(data: bytes, prompt: int, total: int) -> list[Distribution]:
    """Return the distributions at the places of an answer's tokens.

    Args:
        data: answer of ``/v1/completions`` with ``prompt_logprobs``.
        prompt: tokens before the first that is looked at.
        total: tokens that were sent.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested too deeply.
        UnreadableError: it is not what vLLM sends.
        NotFiniteError: a log-probability is not a number.
    """
    found: list[Distribution] = []
    for piece in _pieces(data, prompt, total):
        distributions = _read(piece)
        if distributions is None:
            found.clear()
            break
        found += distributions
        await asyncio.sleep(0)
    if len(found) == total - prompt:
        return found
    return read_distributions(await parse(data), prompt, total)


def _pieces(data: bytes, prompt: int, total: int) -> list[bytes]:
    """Return the entries from ``prompt`` on as JSON lists; nothing where they cannot be cut."""
    _, _, rest = data.partition(_FIRST)
    cut = rest.split(_NEXT)
    if len(cut) != total - 1 or prompt < 1:
        return []
    cut[-1], end, _ = cut[-1].partition(_END)
    bounds = range(prompt - 1, total - 1, PLACES)
    # What looks like a cut within a list is put back.
    return [b'[{"' + _NEXT.join(cut[at : at + PLACES]) + _END for at in bounds] if end else []


def _read(piece: bytes) -> list[Distribution] | None:
    """Return the distributions of a piece, None where it is not as vLLM writes it."""
    try:
        found: list[Distribution] = [
            {int(token): float(told["logprob"]) for token, told in entry.items()}
            for entry in from_json(piece)
        ]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
    if not all(found):
        return None
    check_finite([log for distribution in found for log in distribution.values()])
    return found


async def diverge_in_turns(
    reference: Sequence[Distribution], other: Sequence[Distribution], kl_bound: float
) -> Divergence:
    """Compare two variants as :func:`.divergence.diverge` does, with turns for clients between."""
    parts = []
    for at in range(0, len(reference), PLACES):
        end = at + PLACES
        parts.append(diverge(reference[at:end], other[at:end], kl_bound))
        await asyncio.sleep(0)
    return joined(parts)
