"""Reads log-probabilities out of a worker's answer and compares them, a few places at a time.

Such an answer has hundreds of kilobytes, most of them about the prompt, which nobody looks at. A
parser holds the interpreter until it is done, in a thread of its own as well, and every stream
would wait. So the bytes are cut between two tokens' entries, from the end on, only those of the
answer's tokens are parsed, and clients have their turn after every :data:`PLACES` of them. Where
the cuts are not what they should be (another layout, a token that looks like one), the document is
parsed whole.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from taut_service.guard.divergence import (
    ROUNDING,
    Distribution,
    Divergence,
    diverge,
    expected,
    joined,
    read_distributions,
)

PLACES = 64
"""Tokens read, or compared, in one turn of the event loop: a tenth of a millisecond."""
SMALL_BYTES = 32 * 1024
"""JSON up to this size is parsed in less time than a thread takes to be told."""
# The first token has no entry.
_FIRST, _NEXT, _END = b'"prompt_logprobs":[null,{"', b'}},{"', b"}}]"
_COUNTED = re.compile(rb'"prompt_tokens":(\d+)')


class _Told(msgspec.Struct, gc=False):
    """Of an entry, all that is looked at: rank and text are passed over, unread."""

    logprob: Annotated[float, msgspec.Meta(le=ROUNDING)]


_ENTRIES = msgspec.json.Decoder(list[Annotated[dict[int, _Told], msgspec.Meta(min_length=1)]])


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
    places = total - prompt
    front, *cut = data.rsplit(_NEXT, places)
    if len(cut) == places - 1:
        # Of a prompt of one token.
        cut.insert(0, front.rpartition(_FIRST)[2])
    if not cut or len(cut) != places:
        return []
    cut[-1], _, rest = cut[-1].partition(_END)
    counted = _COUNTED.search(rest)
    if counted is None or int(counted[1]) != total:
        return []
    # What looks like a cut within a list is put back.
    bounds = range(0, places, PLACES)
    return [b'[{"' + _NEXT.join(cut[at : at + PLACES]) + _END for at in bounds]


def _read(piece: bytes) -> list[Distribution] | None:
    """Return the distributions of a piece, None where it is not as vLLM writes it."""
    try:
        entries = _ENTRIES.decode(piece)
    except msgspec.DecodeError:
        # Numbers that are none among them: whoever parses the whole says which error it is.
        return None
    return [{token: told.logprob for token, told in entry.items()} for entry in entries]


async def diverge_in_turns(
    reference: Sequence[Distribution], others: Sequence[Sequence[Distribution]], kl_bound: float
) -> list[Divergence]:
    """Compare readings with one, as :func:`.divergence.diverge` does, with turns for clients.

    Args:
        reference: the baseline's.
        others: each as long.
        kl_bound: nats; more than that at a place counts as that.
    """
    parts: list[list[Divergence]] = [[] for _ in others]
    for at in range(0, len(reference), PLACES):
        end = at + PLACES
        prepared = expected(reference[at:end])
        for other, found in zip(others, parts, strict=True):
            found.append(diverge(prepared, other[at:end], kl_bound))
        await asyncio.sleep(0)
    return [joined(found) for found in parts]
