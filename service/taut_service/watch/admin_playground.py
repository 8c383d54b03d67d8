"""One prompt for two variants, their answers token by token, for the operator's page."""

from __future__ import annotations

import asyncio
import math
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from taut_service.config.reload import Reloader
from taut_service.config.settings import GuardSettings
from taut_service.errors import NotFoundError
from taut_service.guard.reader import BusyError, Reader, ReadError
from taut_service.route.variants import Model

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


def add_playground(admin: FastAPI, reloader: Reloader, settings: GuardSettings) -> None:
    """Add the route.

    Args:
        admin: the application.
        reloader: holds the configuration in force.
        settings: patience with a worker.
    """

    @admin.post("/admin/playground", summary="Ask two variants the same; nobody is charged")
    async def play(body: PlaygroundRequest) -> PlaygroundReport:
        model = reloader.current.names.get(body.model)
        if model is None:
            raise NotFoundError(f"there is no model {body.model!r}", code="model_not_found")
        for name in body.variants:
            if name not in model.variants:
                raise NotFoundError(
                    f"{model.name!r} has no variant {name[:64]!r}", code="variant_not_found"
                )
        asked = (_ask(model, name, body, settings) for name in body.variants)
        one, two = await asyncio.gather(*asked)
        return PlaygroundReport(answers=[one, two], first_difference=_first_difference(one, two))


async def _ask(
    model: Model, name: str, body: PlaygroundRequest, settings: GuardSettings
) -> PlaygroundAnswer:
    fields: dict[str, Any] = {"max_tokens": body.max_tokens, "temperature": 0}
    if body.chat:
        path = "/v1/chat/completions"
        fields |= {"messages": [{"role": "user", "content": body.prompt}], "logprobs": True}
    else:
        path = "/v1/completions"
        fields |= {"prompt": body.prompt, "logprobs": 1}
    reader = Reader(model.variants[name], settings)
    try:
        answer = await reader.ask(path, fields, body.max_tokens)
        return PlaygroundAnswer(variant=name, tokens=_tokens(answer), error="")
    except BusyError:
        error = "no worker can be asked now"
    except ReadError as failure:
        error = str(failure)
    return PlaygroundAnswer(variant=name, tokens=[], error=error)


def _tokens(answer: Any) -> list[Token]:
    try:
        choice = answer["choices"][0]
        told = choice.get("logprobs") or {}
        if told.get("content"):
            pairs = [(part["token"], part["logprob"]) for part in told["content"]]
        elif told.get("tokens"):
            pairs = list(zip(told["tokens"], told["token_logprobs"], strict=True))
        else:
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            return [Token(text=text or "", probability=None)]
        return [Token(text=text, probability=_probability(log)) for text, log in pairs]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ReadError("the worker's answer is not as vLLM writes it") from error


def _probability(log: float) -> float | None:
    return min(1.0, math.exp(log)) if math.isfinite(log) else None


def _first_difference(one: PlaygroundAnswer, two: PlaygroundAnswer) -> int | None:
    texts = [[token.text for token in answer.tokens] for answer in (one, two)]
    for place, (left, right) in enumerate(zip(*texts, strict=False)):
        if left != right:
            return place
    lengths = [len(text) for text in texts]
    return None if lengths[0] == lengths[1] else min(lengths)
