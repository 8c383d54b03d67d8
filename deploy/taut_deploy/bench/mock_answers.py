"""The bytes of the mock engine's answers, and the plan by which they go out.

A plan is a sequence of steps: wait, write, and perhaps end the connection in some way. Plans are
pure data, so that every fault can be read and tested without a socket.
Answers have the shape of vLLM's OpenAI server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from taut_deploy.bench.mock_behaviour import Behaviour

CREATED = 1_700_000_000
PROMPT_TOKENS = 5
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
GARBAGE = b"\x00\xfe\xffthis is not HTTP\r\n\r\n\x17\x03\x01"
REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 503: b"Service Unavailable"}


class Step(NamedTuple):
    """Wait ``delay_s``, write ``data``, then do ``action``.

    ``action`` is "" (go on), "done", "close", "reset", "kill" or "stall".
    """

    delay_s: float
    data: bytes
    action: str = ""


def document(status: int, body: bytes, kind: bytes = b"application/json") -> bytes:
    """Return a whole response."""
    return b"HTTP/1.1 %d %b\r\nserver: mock\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        REASONS.get(status, b"Status"),
        kind,
        len(body),
        body,
    )


def error(status: int, text: str) -> bytes:
    """Return a whole error response in vLLM's shape."""
    content = {"message": text, "type": "MockError", "param": None, "code": status}
    return document(status, json.dumps({"error": content}, allow_nan=False).encode())


@lru_cache(maxsize=64)
def whole(behaviour: Behaviour, chat: bool) -> bytes:
    """Return a generation as one JSON document."""
    text = behaviour.chunk_text * behaviour.chunks
    content: dict[str, Any] = (
        {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    )
    answer = {
        "id": "mock-1",
        "object": "chat.completion" if chat else "text_completion",
        "created": CREATED,
        "model": "m",
        "choices": [{"index": 0, **content, "finish_reason": "length"}],
        "usage": _usage(behaviour.chunks),
    }
    return document(200, json.dumps(answer, allow_nan=False).encode())


@lru_cache(maxsize=64)
def events(behaviour: Behaviour, chat: bool, with_usage: bool) -> tuple[bytes, ...]:
    """Return a generation as HTTP chunks, one event each; ``[DONE]`` and the last chunk included.

    Args:
        behaviour: length and text, and the faults of content.
        chat: delta of a message rather than text.
        with_usage: one more event before ``[DONE]``, as ``stream_options.include_usage`` asks.
    """
    delta: dict[str, Any] = (
        {"delta": {"role": "assistant", "content": behaviour.chunk_text}}
        if chat
        else {"text": behaviour.chunk_text}
    )
    kind = "chat.completion.chunk" if chat else "text_completion"
    frame = {"id": "mock-1", "object": kind, "created": CREATED, "model": "m"}
    token = _event(
        json.dumps({**frame, "choices": [{"index": 0, **delta}]}, allow_nan=False).encode()
    )
    if behaviour.fault == "not_json":
        token = _event(b'{"choices": [')
    elif behaviour.fault == "bad_utf8":
        token = _event(b'{"choices": [{"text": "\xff\xfe\x80"}]}')
    if behaviour.fault == "unterminated":
        return (token,) * behaviour.chunks + (_chunk(b'data: {"choices"'), b"0\r\n\r\n")
    last: tuple[bytes, ...] = (_event(b"[DONE]") + b"0\r\n\r\n",)
    if with_usage:
        usage = {**frame, "choices": [], "usage": _usage(behaviour.chunks)}
        last = (_event(json.dumps(usage, allow_nan=False).encode()), *last)
    return (token,) * behaviour.chunks + last


def plan(behaviour: Behaviour, chat: bool, stream: bool, with_usage: bool) -> Iterator[Step]:
    """Yield how one generation goes out under ``behaviour``, faults included."""
    fault = behaviour.fault
    if fault == "hang":
        return iter((Step(behaviour.ttft_s, b"", "stall"),))
    if fault == "garbage":
        return iter((Step(behaviour.ttft_s, GARBAGE, "done"),))
    if fault == "status":
        answer = error(behaviour.status, "injected")
        return iter((Step(behaviour.ttft_s, answer, "done"),))
    steps = _flow(behaviour, chat, stream, with_usage)
    if fault == "trickle":
        return _trickled(steps, behaviour.trickle_s)
    if fault in ("stall", "close", "reset", "kill", "bad_chunk"):
        return _cut(steps, behaviour.at_byte, fault)
    return steps


def _flow(behaviour: Behaviour, chat: bool, stream: bool, with_usage: bool) -> Iterator[Step]:
    if not stream:
        pause = behaviour.ttft_s + behaviour.itl_s * behaviour.chunks
        yield Step(pause, whole(behaviour, chat), "done")
        return
    yield Step(behaviour.ttft_s, STREAM_HEAD)
    *pieces, last = events(behaviour, chat, with_usage)
    for index, piece in enumerate(pieces):
        yield Step(behaviour.itl_s if index else 0.0, piece)
    yield Step(0.0, last, "done")


def _cut(steps: Iterator[Step], at_byte: int, action: str) -> Iterator[Step]:
    left = at_byte
    for step in steps:
        if len(step.data) < left:
            left -= len(step.data)
            yield step._replace(action="")
            continue
        if action == "bad_chunk":  # at the end of this chunk: inside it, nothing would be wrong
            yield Step(step.delay_s, step.data + b"zz\r\n" + GARBAGE, "done")
        else:
            yield Step(step.delay_s, step.data[:left], action)
        return
    yield Step(0.0, b"", "done")  # the answer is shorter than at_byte: nothing struck


def _trickled(steps: Iterator[Step], pause_s: float) -> Iterator[Step]:
    for step in steps:
        for index in range(len(step.data)):
            end = index == len(step.data) - 1
            yield Step(
                pause_s + (0 if index else step.delay_s),
                step.data[index : index + 1],
                step.action if end else "",
            )


def _event(data: bytes) -> bytes:
    return _chunk(b"data: " + data + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _usage(chunks: int) -> dict[str, int]:
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": chunks,
        "total_tokens": PROMPT_TOKENS + chunks,
    }
