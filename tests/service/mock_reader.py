"""A mock worker that also reads: ``/tokenize`` and ``prompt_logprobs``, with harm on demand.

Its "model" is a table of logits drawn from a hash of the last tokens, so two engines agree exactly
unless one is told to be harmed or noisy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from mock_engine import Conversation, Faults, MockEngine, Seen

WORDS = 24
FIRST_TOKEN = 96
"""Tokens are bytes, and those that the table knows are ``96`` to ``119``: a multiple of 24 on."""
Logits = npt.NDArray[np.float64]


@lru_cache(maxsize=10_000)
def _drawn(context: tuple[int, ...]) -> tuple[Logits, Logits]:
    """Return the logits after some tokens, and the direction of all harm there.

    Every engine of a test reads the same prompts, and to seed a generator takes longest.
    """
    rng = np.random.default_rng(context)
    return rng.normal(0, 2, WORDS), rng.normal(size=WORDS)


@dataclass
class Reading:
    """What is wrong with a model.

    ``harm`` and ``noise`` are standard deviations added to its logits: harm is always the same at
    a place, noise differs from call to call. ``prefix`` stands before every prompt, as another
    chat template would. ``answer`` replaces an answer to a conversation or a prompt, ``calls_tool``
    makes it the arguments of a call. ``raw`` is the whole answer to a reading, ``tokenized`` to
    ``/tokenize``. ``delay_s`` is spent by ``sleep`` before a reading. With a
    ``temperature`` answers are drawn from the table.
    """

    harm: float = 0.0
    noise: float = 0.0
    delay_s: float = 0.0
    prefix: str = ""
    nan: bool = False
    status: int = 200
    raw: bytes | None = None
    tokenized: bytes | None = None
    answer: str | None = None
    calls_tool: str | None = None
    encoding: str = "utf-8"
    temperature: float | None = None
    finish_reason: str = "stop"
    seed: int = 0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    calls: list[str] = field(default_factory=list)


class ReadingEngine(MockEngine):
    """A mock worker that reads."""

    def __init__(self, reading: Reading | None = None, faults: Faults | None = None) -> None:
        super().__init__(faults or Faults(tokens=12))
        self.reading = reading or Reading()
        self.rng = np.random.default_rng(self.reading.seed)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ReadingConversation(self), "127.0.0.1", self.port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]


class ReadingConversation(Conversation):
    """One connection to it."""

    engine: ReadingEngine

    async def respond(self, request: Seen) -> None:
        path = request.path.partition("?")[0]
        reading = self.engine.reading
        body = request.json if request.body else {}
        if path == "/tokenize":
            reading.calls.append(path)
            tokens = list(text_of(body, reading.prefix).encode(reading.encoding))
            told = json.dumps({"tokens": tokens, "count": len(tokens)}).encode()
            self.write(200, told if reading.tokenized is None else reading.tokenized)
        elif path == "/v1/completions" and "prompt_logprobs" in body:
            reading.calls.append("read")
            with contextlib.suppress(asyncio.CancelledError):
                await self.read(body)
        else:
            if path in ("/v1/completions", "/v1/chat/completions") and body.get("max_tokens") != 1:
                reading.calls.append("answer")
            await super().respond(request)

    async def read(self, body: dict[str, Any]) -> None:
        reading = self.engine.reading
        assert body["max_tokens"] == 1
        if reading.delay_s:
            await reading.sleep(reading.delay_s)
        if reading.raw is not None:
            self.write(200, reading.raw)
            return
        if reading.status != 200:
            self.write(reading.status, b"{}")
            return
        entries = [None, *self.entries(body["prompt"], body["prompt_logprobs"])]
        answer = {"choices": [{"index": 0, "text": "", "prompt_logprobs": entries}]}
        self.write(200, json.dumps(answer).encode())

    def entries(self, tokens: list[int], top_k: int) -> list[dict[str, Any]]:
        reading, noise = self.engine.reading, self.engine.rng
        found = []
        for place in range(1, len(tokens)):
            context = tokens[max(0, place - 4) : place]
            own, harm = _drawn(tuple(context))
            logits = own + reading.harm * harm + reading.noise * noise.normal(size=WORDS)
            logs = logits - np.log(np.exp(logits).sum())
            shown = {*np.argsort(-logs)[:top_k].tolist(), tokens[place] % WORDS}
            nan = float("nan") if reading.nan else 0.0
            found.append(
                {
                    str(FIRST_TOKEN + token): {
                        "logprob": float(logs[token]) + nan,
                        "rank": int((logs > logs[token]).sum()) + 1,
                        "decoded_token": "x",
                    }
                    for token in shown
                }
            )
        return found

    def draw(self, body: dict[str, Any]) -> str:
        """Return an answer of ``max_tokens`` out of the table, by the worker's own temperature."""
        reading, rng = self.engine.reading, self.engine.rng
        assert "temperature" not in body and reading.temperature is not None
        tokens = list(text_of(body, reading.prefix).encode())
        before = len(tokens)
        for _ in range(body["max_tokens"]):
            logits, _ = _drawn(tuple(tokens[-4:]))
            shares = np.exp(logits / reading.temperature)
            tokens.append(FIRST_TOKEN + int(rng.choice(WORDS, p=shares / shares.sum())))
        return bytes(tokens[before:]).decode()

    def events(self, body: dict[str, Any], path: str) -> Iterator[bytes]:
        reading = self.engine.reading
        if reading.answer is None or not body.get("logprobs"):
            yield from super().events(body, path)
            return
        for word in reading.answer.split(" "):
            choice: dict[str, Any] = {"index": 0, "text": word}
            choice["logprobs"] = {"tokens": [word], "token_logprobs": [-0.5]}
            if "chat" in path:
                choice = {"index": 0, "delta": {"content": word}}
                choice["logprobs"] = {"content": [{"token": word, "logprob": -0.5}]}
            yield self.event({"choices": [choice]})
        yield self.event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
        yield b"data: [DONE]\n\n"

    async def whole(self, body: dict[str, Any], path: str) -> None:
        reading = self.engine.reading
        text = self.draw(body) if reading.temperature is not None else reading.answer
        if text is None:
            await super().whole(body, path)
            return
        words = text.split(" ")
        told = [{"token": word, "logprob": -0.5} for word in words]
        told_as: dict[str, Any] = {"message": {"content": text}} if "chat" in path else {}
        if reading.calls_tool is not None:
            call = {"function": {"name": reading.calls_tool, "arguments": text}}
            told_as["message"] = {"content": None, "tool_calls": [call]}
        if body.get("logprobs"):
            told_as["logprobs"] = (
                {"content": told}
                if "chat" in path
                else {"tokens": words, "token_logprobs": [-0.5] * len(words)}
            )
        choice = {"index": 0, "text": text, "finish_reason": reading.finish_reason}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        answer = {"id": "x", "model": body.get("model"), "choices": [{**choice, **told_as}]}
        self.write(200, json.dumps({**answer, "usage": usage}).encode())


def text_of(body: dict[str, Any], prefix: str) -> str:
    if "prompt" in body:
        special = body.get("add_special_tokens", True)
        return ("^" if special else "") + str(body["prompt"])
    turns = [f"<{message['role']}>{message['content']}" for message in body["messages"]]
    return prefix + "".join(turns) + "<assistant>"
