"""What an answer does, as opposed to what its tokens say: loops, length, structure.

Looked at in two answers to the same request, the variant's and the baseline's. Each fault is 0 or
1, so their difference is a bounded observation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

LOOP_PERIOD = 64
"""Longest repeated piece that is looked for, in characters."""
LOOP_LENGTH = 200
"""Characters at the end of an answer that must be a repetition."""
FAULTS = ("loop", "cut", "invalid")


class Answer(NamedTuple):
    """One choice of an answer.

    Args:
        text: generated, without tool calls.
        finish_reason: as the worker says, ``""`` if it does not.
        tool_calls: name and arguments of each.
    """

    text: str
    finish_reason: str
    tool_calls: tuple[tuple[str, str], ...] = ()


def faults(request: Mapping[str, Any], answer: Answer, other: Answer) -> dict[str, bool | None]:
    """Say which faults an answer has.

    Args:
        request: the client's body.
        answer: to it.
        other: the other variant's answer to it.

    Returns:
        ``loop``: it ends in a repetition. ``cut``: it ran into the length limit. ``invalid``: not
        the JSON, or not the tool calls, that were asked for, or no call where the other has a
        good one; None where nothing was asked for.
    """
    return {
        "loop": is_loop(answer.text),
        "cut": answer.finish_reason == "length",
        "invalid": _is_invalid(request, answer, other),
    }


def kind_of(request: Mapping[str, Any]) -> str:
    """Return the slice a request belongs to: ``tools``, ``json``, ``chat`` or ``text``."""
    if request.get("tools"):
        return "tools"
    if _wants_json(request):
        return "json"
    return "chat" if "messages" in request else "text"


KINDS = ("text", "chat", "json", "tools")


def is_loop(text: str) -> bool:
    """Whether a text ends in the same piece again and again."""
    end = text[-LOOP_LENGTH:]
    if len(end) < LOOP_LENGTH:
        return False
    return any(end[period:] == end[:-period] for period in range(1, LOOP_PERIOD + 1))


def _wants_json(request: Mapping[str, Any]) -> bool:
    wished = request.get("response_format")
    return isinstance(wished, Mapping) and wished.get("type") in ("json_object", "json_schema")


def _is_invalid(request: Mapping[str, Any], answer: Answer, other: Answer) -> bool | None:
    if request.get("tools"):
        offered = _offered(request["tools"])
        if answer.tool_calls:
            return not _are_good(answer, offered)
        # Calls that a worker does not know as such any more come to the client as text.
        return bool(other.tool_calls) and _are_good(other, offered)
    if not _wants_json(request):
        return None
    value = _parsed(answer.text)
    return not isinstance(value, dict) or _lacks_required(request["response_format"], value)


def _are_good(answer: Answer, offered: set[str]) -> bool:
    return all(
        name in offered and isinstance(_parsed(arguments), dict)
        for name, arguments in answer.tool_calls
    )


def _lacks_required(wished: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    named = wished.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    required = schema.get("required") if isinstance(schema, Mapping) else None
    names = required if isinstance(required, list) else []
    return any(isinstance(name, str) and name not in value for name in names)


def _offered(tools: Any) -> set[str]:
    listed = tools if isinstance(tools, list) else []
    functions = (tool.get("function") for tool in listed if isinstance(tool, Mapping))
    return {str(f.get("name")) for f in functions if isinstance(f, Mapping)}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
