"""Clients of a rehearsed rollout: a fixed number of them, each asks when it was answered."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from taut_deploy.errors import MeasureError

_TOPICS = (
    "the printing press",
    "why the sky is blue",
    "how bread rises",
    "the moons of Jupiter",
    "a walk by the sea",
    "how a bill becomes law",
    "the first telephone",
    "a library at night",
    "how bees find flowers",
    "the rules of chess",
    "a long train journey",
    "what makes a good friend",
    "how vaccines work",
    "the history of paper",
    "a garden in autumn",
    "how to mend a bicycle",
)
_FORMS = (
    "Here is a short essay about {}.\n\n",
    "A teacher explains {} to a child:\n",
    "Question: What should I know about {}?\nAnswer:",
    "The story begins with {}.",
    "Five facts about {}:\n1.",
    "Dear editor, your article about {}",
)

_PAUSE_S = 0.1


@dataclass(frozen=True)
class Load:
    """What clients ask for.

    Args:
        prompts: asked in turn.
        concurrency: clients.
        tokens: longest answer.
    """

    prompts: Sequence[str]
    concurrency: int
    tokens: int


def read_prompts(file: Path | None) -> list[str]:
    """Return a file's lines that are not empty, or prompts of our own.

    Raises:
        MeasureError: the file cannot be read, or has no line.
    """
    if file is None:
        return [form.format(topic) for topic in _TOPICS for form in _FORMS]
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        told = getattr(error, "strerror", None) or "not UTF-8 text"
        raise MeasureError(f"--prompts {file}: {told}") from error
    found = [line for line in lines if line.strip()]
    if not found:
        raise MeasureError(f"--prompts {file}: holds no prompt; one on each line")
    return found


class Traffic:
    """Requests until it is left; every second one is a stream.

    Args:
        url: of the gateway.
        model: public name.
        load: what to ask.
    """

    def __init__(self, url: str, model: str, load: Load) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._load = load
        self.answered: Counter[str] = Counter()
        """Whole answers by variant."""
        self.streams = 0
        self.failures: Counter[str] = Counter()
        """What else came of requests."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ask while the context lasts."""
        numbers = itertools.count()
        async with httpx.AsyncClient(timeout=120) as client:
            tasks = [
                asyncio.create_task(self._ask_all(client, numbers))
                for _ in range(self._load.concurrency)
            ]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _ask_all(self, client: httpx.AsyncClient, numbers: Iterator[int]) -> None:
        for number in numbers:
            prompts = self._load.prompts
            body = {
                "model": self._model,
                "prompt": prompts[number % len(prompts)],
                "max_tokens": self._load.tokens,
                "temperature": 0.7,
                "seed": number,
                "stream": number % 2 == 1,
            }
            try:
                await self._ask(client, body)
            except httpx.HTTPError as error:
                await self._failed(type(error).__name__)

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with client.stream("POST", self._url, json=body) as answer:
            content = await answer.aread()
        if answer.status_code != httpx.codes.OK:
            await self._failed(str(answer.status_code))
        elif body["stream"] and not content.rstrip().endswith(b"data: [DONE]"):
            await self._failed("broken stream")
        else:
            self.answered[answer.headers["x-taut-variant"]] += 1
            self.streams += body["stream"]

    async def _failed(self, kind: str) -> None:
        self.failures[kind] += 1
        # A gateway that refuses, or is not there, is not asked without a pause.
        await asyncio.sleep(_PAUSE_S)

    def as_json(self) -> dict[str, Any]:
        """Return what was counted."""
        return {
            "answered": dict(self.answered),
            "streams": self.streams,
            "failures": dict(self.failures),
        }
