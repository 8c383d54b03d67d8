"""One prompt for two variants, their answers token by token, for the operator's page."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from taut_service.config.reload import Reloader
from taut_service.config.settings import GuardSettings
from taut_service.errors import NotFoundError
from taut_service.guard.reader import BusyError, Reader, ReadError

_NOBODY = "no worker can be asked now"
_Name = Annotated[str, Field(min_length=1, max_length=256)]


class PlaygroundRequest(BaseModel):
    """What is asked of whom; greedy, so that answers can be compared."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: _Name
    variants: Annotated[list[_Name], Field(min_length=2, max_length=2)]
    prompt: Annotated[str, Field(min_length=1, max_length=100_000)]
    max_tokens: Annotated[int, Field(ge=1, le=512)] = 64
    chat: bool = False


class Token(BaseModel):
    """A token, and how probable its variant held it to be; None if the worker does not tell."""

    text: str
    probability: float | None


class PlaygroundAnswer(BaseModel):
    """What one variant said, or why it said nothing."""

    variant: str
    tokens: list[Token]
    error: str


class PlaygroundReport(BaseModel):
    """Both answers; ``first_difference`` is the place of the first different token."""

    answers: list[PlaygroundAnswer]
    first_difference: int | None


class PlaygroundPart(BaseModel):
    """What came of one answer; ``side`` is its place in ``variants``, ``last`` its end."""

    side: int
    tokens: list[Token] = []
    error: str = ""
    last: bool = False


def add_playground(admin: FastAPI, reloader: Reloader, settings: GuardSettings) -> None:
    """Add the route.

    Args:
        admin: the application.
        reloader: holds the configuration in force.
        settings: patience with a worker.
    """

    @admin.post("/admin/playground", summary="Ask two variants the same; nobody is charged")
    async def play(body: PlaygroundRequest) -> PlaygroundReport:
        readers = _readers(reloader, settings, body)
        asked = (
            _ask(reader, name, body) for reader, name in zip(readers, body.variants, strict=True)
        )
        one, two = await asyncio.gather(*asked)
        return PlaygroundReport(answers=[one, two], first_difference=_first_difference(one, two))

    @admin.post(
        "/admin/playground/stream",
        summary="The same, each answer's tokens as they come: events of PlaygroundPart",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}},
    )
    async def play_live(body: PlaygroundRequest) -> StreamingResponse:
        events = _live(_readers(reloader, settings, body), body)
        headers = {"cache-control": "no-store"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def _readers(reloader: Reloader, settings: GuardSettings, body: PlaygroundRequest) -> list[Reader]:
    """One for each variant that is asked for.

    Raises:
        NotFoundError: there is no such model or variant.
    """
    model = reloader.current.names.get(body.model)
    if model is None:
        raise NotFoundError(f"there is no model {body.model!r}", code="model_not_found")
    for name in body.variants:
        if name not in model.variants:
            raise NotFoundError(
                f"{model.name!r} has no variant {name[:64]!r}", code="variant_not_found"
            )
    return [Reader(model.variants[name], settings) for name in body.variants]


def _request(body: PlaygroundRequest) -> tuple[str, dict[str, Any]]:
    """Path and fields for a worker."""
    fields: dict[str, Any] = {"max_tokens": body.max_tokens, "temperature": 0}
    if body.chat:
        said = [{"role": "user", "content": body.prompt}]
        return "/v1/chat/completions", {**fields, "messages": said, "logprobs": True}
    return "/v1/completions", {**fields, "prompt": body.prompt, "logprobs": 1}


async def _ask(reader: Reader, name: str, body: PlaygroundRequest) -> PlaygroundAnswer:
    path, fields = _request(body)
    try:
        answer = await reader.ask(path, fields, body.max_tokens)
        return PlaygroundAnswer(variant=name, tokens=_tokens(answer), error="")
    except (BusyError, ReadError) as failure:
        return PlaygroundAnswer(variant=name, tokens=[], error=str(failure) or _NOBODY)


async def _live(readers: list[Reader], body: PlaygroundRequest) -> AsyncIterator[bytes]:
    """Events of both answers, in the order in which they come."""
    parts: asyncio.Queue[PlaygroundPart] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_follow(side, reader, body, parts.put_nowait))
        for side, reader in enumerate(readers)
    ]
    try:
        left = len(tasks)
        while left:
            part = await parts.get()
            left -= part.last
            yield b"data: %b\n\n" % part.model_dump_json().encode()
    finally:
        for task in tasks:
            task.cancel()


async def _follow(
    side: int, reader: Reader, body: PlaygroundRequest, put: Callable[[PlaygroundPart], None]
) -> None:
    path, fields = _request(body)
    last = PlaygroundPart(side=side, last=True)
    try:
        async for event in reader.events(path, fields, body.max_tokens):
            if event.get("choices") and (tokens := _tokens(event)):
                put(PlaygroundPart(side=side, tokens=tokens))
    except (BusyError, ReadError) as failure:
        last.error = str(failure) or _NOBODY
    put(last)


def _tokens(answer: Any) -> list[Token]:
    """Of a whole answer or of an event of a stream."""
    try:
        choice = answer["choices"][0]
        told = choice.get("logprobs") or {}
        if told.get("content"):
            pairs = [(part["token"], part["logprob"]) for part in told["content"]]
        elif told.get("tokens"):
            pairs = list(zip(told["tokens"], told["token_logprobs"], strict=True))
        else:
            said = choice.get("message", choice.get("delta"))
            text = choice["text"] if said is None else said.get("content")
            return [Token(text=text, probability=None)] if text else []
        return [Token(text=text, probability=_probability(log)) for text, log in pairs]
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ReadError("the worker's answer is not as vLLM writes it") from error


def _probability(log: float) -> float | None:
    return math.exp(min(0.0, log)) if math.isfinite(log) else None


def _first_difference(one: PlaygroundAnswer, two: PlaygroundAnswer) -> int | None:
    texts = [[token.text for token in answer.tokens] for answer in (one, two)]
    for place, (left, right) in enumerate(zip(*texts, strict=False)):
        if left != right:
            return place
    lengths = [len(text) for text in texts]
    return None if lengths[0] == lengths[1] else min(lengths)
