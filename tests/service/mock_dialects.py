"""What vLLM 0.32 sends on ``/v1/responses`` and ``/v1/messages``, shortened: shapes and order.

Read in its sources, ``vllm/entrypoints/openai/responses`` and ``vllm/entrypoints/anthropic``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

PATHS = ("/v1/responses", "/v1/messages")
RESPONSE_USAGE = {
    "input_tokens": 5,
    "input_tokens_details": {"cached_tokens": 2, "input_tokens_per_turn": [5]},
    "output_tokens": 4,
    "output_tokens_details": {"reasoning_tokens": 0, "output_tokens_per_turn": [4]},
    "total_tokens": 9,
}
# vLLM counts cached tokens apart, as Anthropic does: 3 + 2 are the prompt's 5.
MESSAGE_USAGE = {"input_tokens": 3, "output_tokens": 4, "cache_read_input_tokens": 2}


def whole(body: dict[str, Any], path: str, tokens: list[str]) -> dict[str, Any]:
    text = "".join(tokens)
    if path == "/v1/responses":
        return response(body, "completed", text)
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": text}],
        "model": body.get("model"),
        "stop_reason": "end_turn",
        "usage": MESSAGE_USAGE,
    }


def response(body: dict[str, Any], status: str, text: str) -> dict[str, Any]:
    done = status == "completed"
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "id": "resp_1",
        "object": "response",
        "status": status,
        "metadata": {"usage": "not this one", **(body.get("metadata") or {})},
        "model": body.get("model"),
        "output": [{"type": "message", "role": "assistant", "content": content}] if done else [],
        "usage": RESPONSE_USAGE if done else None,
        "user": None,
    }


def events(body: dict[str, Any], path: str, tokens: list[str]) -> Iterator[bytes]:
    make = response_events if path == "/v1/responses" else message_events
    for document in make(body, tokens):
        yield b"event: %b\ndata: %b\n\n" % (
            document["type"].encode(),
            json.dumps(document).encode(),
        )


def response_events(body: dict[str, Any], tokens: list[str]) -> Iterator[dict[str, Any]]:
    start = response(body, "in_progress", "")
    yield {"type": "response.created", "sequence_number": 0, "response": start}
    yield {"type": "response.in_progress", "sequence_number": 1, "response": start}
    for number, token in enumerate(tokens, start=2):
        yield {"type": "response.output_text.delta", "sequence_number": number, "delta": token}
    yield {
        "type": "response.completed",
        "sequence_number": len(tokens) + 2,
        "response": response(body, "completed", "".join(tokens)),
    }


def message_events(body: dict[str, Any], tokens: list[str]) -> Iterator[dict[str, Any]]:
    message: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant"}
    message |= {"content": [], "model": body.get("model")}
    usage = {"input_tokens": 5, "output_tokens": 0}
    yield {"type": "message_start", "message": {**message, "usage": usage}}
    block = {"type": "text", "text": ""}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    for token in tokens:
        delta = {"type": "text_delta", "text": token}
        yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    stop = {"stop_reason": "end_turn", "stop_sequence": None}
    yield {"type": "message_delta", "delta": stop, "usage": MESSAGE_USAGE}
    yield {"type": "message_stop"}
