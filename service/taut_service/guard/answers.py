"""Reads what a client was sent: a document or a whole stream, of completions or of chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from taut_service.guard.behaviour import Answer


def read_answer(data: bytes) -> Answer | None:
    """Return the one choice of an answer.

    Args:
        data: the body as sent: JSON, or events.

    Returns:
        None if it cannot be read, is an error, or has several choices.
    """
    try:
        return answer_of(_documents(data))
    except (ValueError, RecursionError):
        return None


def answer_of(documents: Sequence[Any]) -> Answer | None:
    """Return the one choice of parsed documents, as :func:`read_answer` does."""
    try:
        return _joined(documents)
    except (KeyError, TypeError, AttributeError):
        return None


def _documents(data: bytes) -> list[Any]:
    if data.lstrip()[:1] == b"{":
        return [json.loads(data)]
    lines = (line[5:].strip() for line in data.splitlines() if line.startswith(b"data:"))
    payloads = [line for line in lines if line and line != b"[DONE]"]
    # At once: a call for each costs as much as what it reads.
    found: list[Any] = json.loads(b"[" + b",".join(payloads) + b"]")
    if len(found) != len(payloads):
        raise ValueError("an event is no JSON")
    return found


def _joined(documents: Sequence[Any]) -> Answer | None:
    text: list[str] = []
    reason = ""
    calls: dict[int, list[str]] = {}
    seen = False
    for document in documents:
        if "error" in document:
            return None
        for choice in document["choices"]:
            if choice.get("index", 0) != 0:
                return None
            seen = True
            reason = choice.get("finish_reason") or reason
            part = choice.get("message") or choice.get("delta") or choice
            text.append(part.get("content") or part.get("text") or "")
            for number, call in enumerate(part.get("tool_calls") or ()):
                function = call.get("function") or {}
                parts = calls.setdefault(call.get("index", number), ["", ""])
                parts[0] += function.get("name") or ""
                parts[1] += function.get("arguments") or ""
    if not seen:
        return None
    tools = tuple((name, arguments) for _, (name, arguments) in sorted(calls.items()))
    return Answer("".join(text), reason, tools)
