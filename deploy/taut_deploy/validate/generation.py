"""What a model is asked to write, and what it answers; the same for files and servers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

FinishReason = Literal["stop", "length"]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Generation:
    """How an answer is written: greedily, up to a length.

    Args:
        max_tokens: at most as many.
        stop: texts that end the answer; they are cut off.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What was written.

    Args:
        text: special tokens and stop texts left out.
        tokens: how many were generated, the last token included.
        finish_reason: ``stop`` for the model's own end or a stop text, ``length`` for the limit.
        tool_calls: name and arguments (JSON text) of each call that a server parsed; None where
            none was parsed and ``text`` may hold calls.
    """

    text: str
    tokens: int
    finish_reason: FinishReason
    tool_calls: tuple[tuple[str, str], ...] | None = None


def within(generation: Generation, prompt: int, positions: int | None) -> Generation | None:
    """As much of a generation as a model's context has room for after its prompt.

    Args:
        generation: as asked for.
        prompt: tokens of the prompt.
        positions: tokens of the context; None where the model does not say.

    Returns:
        The generation, shortened if need be; None where there is no room for one token.
    """
    if positions is None:
        return generation
    room = positions - prompt
    return replace(generation, max_tokens=min(generation.max_tokens, room)) if room > 0 else None


def cut_at_stop(text: str, stop: Sequence[str]) -> str | None:
    """The text before the first stop text; None if none is in it."""
    found = [at for at in (text.find(end) for end in stop) if at >= 0]
    return text[: min(found)] if found else None
