"""Tool calls in an answer, and whether they are ones that could be made.

A server with a parser hands them out; from files they are read out of the text, in the forms that
chat templates teach: ``<tool_call>{...}</tool_call>`` (Hermes, Qwen), ``[TOOL_CALLS][{...}]``
(Mistral), and an object or a list of objects with ``name`` and ``arguments`` or ``parameters``
(Llama 3), after ``<|python_tag|>`` or alone.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator

from taut_deploy.validate.generation import Answer, Message

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_MARKS = ("[TOOL_CALLS]", "<|python_tag|>")
Call = tuple[str, Any]


def calls_of(answer: Answer) -> list[Call]:
    """Name and arguments of each call; arguments are None where they are no JSON.

    Args:
        answer: of a model that was offered tools.
    """
    if answer.tool_calls is not None:
        return [(name, _parsed(arguments or "{}")) for name, arguments in answer.tool_calls]
    text = answer.text.strip()
    tagged = _TAGGED.findall(text)
    if tagged:
        return [call for part in tagged for call in _calls(_parsed(part))]
    for mark in _MARKS:
        text = text.removeprefix(mark)
    return _calls(_parsed(text))


def is_valid_call(calls: Sequence[Call], tools: Sequence[Message]) -> bool:
    """Whether there is a call, and every call names an offered tool and gives what it takes.

    Args:
        calls: from :func:`calls_of`.
        tools: offered, as in the OpenAI API.
    """
    offered = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    return bool(calls) and all(
        name in offered
        and isinstance(arguments, dict)
        and Draft202012Validator(offered[name]).is_valid(arguments)
        for name, arguments in calls
    )


def named(calls: Sequence[Call]) -> tuple[str, ...]:
    """The tools that were called, in order."""
    return tuple(name for name, _ in calls)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _calls(value: Any) -> list[Call]:
    """Calls of a parsed value; an item without a name is a call of a tool that nobody offers."""
    if value is None:
        return []
    found = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, Mapping):
            return []
        arguments = item.get("arguments", item.get("parameters"))
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        found.append((str(item.get("name", "")), arguments))
    return found
