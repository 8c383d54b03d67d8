"""One streamed completion and when its tokens came.

Time to first token runs from before the request is sent to the read that brought the first token,
so it holds the connection's set-up where none was open. The inter-token latency is taken per token:
the time between two reads is spread evenly over the tokens of the later one. A server that sends
two tokens at a time would otherwise show a median of zero. How many tokens an event brought is told
by vLLM's ``continuous_usage_stats``; without it an event counts as one token.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from taut_deploy.validate.errors import one_line

_OK = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request.

    Args:
        failure: why it does not count, or None.
        status: HTTP status, or None where there was none.
        ttft_s: seconds to the first token; 0 if it failed.
        e2e_s: seconds to the end of the stream or the failure.
        gaps_s: seconds between tokens, one for each token after the first read; none if all came
            in one.
        tokens: tokens of the answer; 0 if it failed.
    """

    failure: str | None
    status: int | None
    ttft_s: float
    e2e_s: float
    gaps_s: tuple[float, ...]
    tokens: int


@dataclass(slots=True)
class StreamReader:
    """Counts the tokens of server-sent events as they arrive.

    Args:
        started_s: clock when the request was sent.
    """

    started_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: bool = False
    problem: str | None = None
    _line: bytes = b""

    def feed(self, piece: bytes, now_s: float) -> None:
        """Take one read.

        Args:
            piece: bytes as they came, cut anywhere.
            now_s: clock when they came.
        """
        before, events = self.tokens, 0
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                events += self._event(line[5:].strip())
        if not events:  # the last one only tells the total
            return
        if before == 0:
            self.first_s = now_s
        else:
            arrived = max(self.tokens - before, 1)  # a total may be below the events counted
            self.gaps_s += [(now_s - self.last_s) / arrived] * arrived
        self.last_s = now_s

    def _event(self, data: bytes) -> bool:
        """Read one event; True if it brought a token."""
        if data == b"[DONE]":
            self.ended = True
            return False
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            self.problem = self.problem or "an event that is not JSON"
            return False
        if not isinstance(content, dict) or content.get("error"):
            self.problem = self.problem or f"an error event: {_message(content)}"
            return False
        usage, carries, before = content.get("usage"), bool(content.get("choices")), self.tokens
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self.tokens = usage["completion_tokens"]
        elif carries:
            self.tokens += 1
        return carries and self.tokens > before

    def answer(self, now_s: float, expected_tokens: int) -> Answer:
        """Judge the whole stream.

        Args:
            now_s: clock at its end.
            expected_tokens: an answer of any other length fails: it cannot be compared.
        """
        failure = self.problem
        if failure is None and not self.ended:
            failure = "the stream ended without [DONE]"
        if failure is None and self.tokens != expected_tokens:
            failure = f"{self.tokens} tokens in place of {expected_tokens}"
        if failure is not None:
            return failed(failure, now_s - self.started_s, _OK)
        return Answer(
            failure=None,
            status=_OK,
            ttft_s=self.first_s - self.started_s,
            e2e_s=now_s - self.started_s,
            gaps_s=tuple(self.gaps_s),
            tokens=self.tokens,
        )


def failed(why: str, seconds: float, status: int | None = None) -> Answer:
    """The record of a request that gave no whole answer after ``seconds``."""
    return Answer(why, status, 0.0, seconds, (), 0)


async def ask(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], timeout_s: float
) -> Answer:
    """Send one completion request and time its stream.

    Args:
        client: without a time-out of its own.
        url: of ``/v1/completions``.
        body: the request, with ``stream`` and ``max_tokens``.
        timeout_s: seconds for all of it.

    Returns:
        The answer; whatever goes wrong on the way is a failed one.
    """
    started = time.perf_counter()
    reader = StreamReader(started)
    try:
        async with asyncio.timeout(timeout_s), client.stream("POST", url, json=body) as response:
            if response.status_code != _OK:
                text = (await response.aread()).decode(errors="replace")
                why = f"HTTP {response.status_code}: {_message(_parsed(text))}"
                return failed(why, time.perf_counter() - started, response.status_code)
            async for piece in response.aiter_bytes():
                reader.feed(piece, time.perf_counter())
    except TimeoutError:
        return failed(f"no whole answer within {timeout_s:g} s", time.perf_counter() - started)
    except httpx.HTTPError as error:
        return failed(f"connection: {type(error).__name__}", time.perf_counter() - started)
    return reader.answer(time.perf_counter(), body["max_tokens"])


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _message(content: Any) -> str:
    """The message of an OpenAI-shaped error, or what there is instead."""
    error = content.get("error", content) if isinstance(content, dict) else content
    message = error.get("message", error) if isinstance(error, dict) else error
    return one_line(ValueError(str(message)), 120)
