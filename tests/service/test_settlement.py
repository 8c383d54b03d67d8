"""What a stream is charged: the worker's count, and never less than what passed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from taut_service.admit.limits.bucket import RateLimit
from taut_service.admit.limits.estimate import Estimate
from taut_service.admit.limits.limiter import RateLimiter
from taut_service.admit.limits.memory import MemoryLimitStore
from taut_service.admit.limits.settlement import settle
from taut_service.call import CLIENT_CLOSED, ROUTES, Call
from taut_service.http.sse import SseReframer, Usage
from taut_service.watch.metrics import Metrics


def event(**fields: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(fields).encode()


def charged(stream: bytes, status: int = 200) -> int:
    """Return the tokens that a stream costs whose prompt was estimated as 10."""
    reframer = SseReframer(count_text=True)
    reframer.feed(stream)
    store, limit = MemoryLimitStore(lambda: 0.0), RateLimit(None, 10**6)
    limiter = RateLimiter(store, lambda _: None)
    reservation = asyncio.run(limiter.reserve("a", limit, Estimate(10, 1000)))
    call = Call(ROUTES[0], b"id", Metrics().route("m", "completions"))
    call.streaming = True
    call.routed.worker = "w"
    call.answer.status = status
    call.answer.usage = reframer.usage
    call.answer.events = reframer.events
    call.answer.text_bytes = reframer.text_bytes
    settle(call, reservation)
    return 10**6 - int(asyncio.run(store.take("a", limit, 0)).tokens)


@pytest.mark.parametrize(
    "part",
    [
        {"choices": [{"text": "word" * 500}]},
        {"choices": [{"delta": {"content": "word" * 500}}]},
        {"choices": [{"delta": {"reasoning": "word" * 500}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "word" * 500}}]}}]},
        {"type": "response.output_text.delta", "delta": "word" * 500},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "word" * 500}},
        {"type": "content_block_delta", "delta": {"partial_json": '"wor' * 500}},
    ],
)
def test_many_tokens_in_one_event_are_counted_by_their_text(part: dict[str, Any]) -> None:
    assert charged(event(**part)) >= 10 + 500


def test_small_events_count_one_each() -> None:
    assert charged(event(choices=[{"text": "a"}]) * 7) == 10 + 7


def test_whole_stream_is_charged_what_the_worker_says() -> None:
    last = event(usage={"prompt_tokens": 4, "completion_tokens": 5})
    assert charged(event(choices=[{"text": "word" * 50}]) * 7 + last) == 9


def test_leaving_before_the_worker_has_counted_is_not_free() -> None:
    # Anthropic's first event has the prompt and no completion.
    first = event(message={"usage": {"input_tokens": 6, "output_tokens": 0}})
    text = event(type="content_block_delta", delta={"type": "text_delta", "text": "word" * 50})
    assert charged(first + text, CLIENT_CLOSED) == 6 + 50
    assert charged(first + text, 502) == 6 + 50


def test_reading_usage_as_it_grows() -> None:
    growing = event(choices=[{"text": "a"}], usage={"prompt_tokens": 4, "completion_tokens": 90})
    reframer = SseReframer(count_text=True)
    reframer.feed(growing)
    assert reframer.usage == Usage(4, 90)
    assert charged(growing, CLIENT_CLOSED) == 94


def test_text_of_many_sizes_is_counted_as_if_each_was_read() -> None:
    """Events of a size that was seen before are not read again: one stream, one shape."""
    sizes = [1, 4, 9, 4, 1, 700, 2000, 4, 2000, 9, 1]
    reframer = SseReframer(count_text=True)
    for size in sizes:
        reframer.feed(event(id="x", choices=[{"delta": {"content": "w" * size}}], n=None))
    assert reframer.text_bytes == sum(sizes)
