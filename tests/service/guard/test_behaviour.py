"""What answers do: read from documents and streams, and judged against the request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from taut_service.guard.answers import read_answer
from taut_service.guard.behaviour import Answer, faults, is_loop, kind_of

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
GOOD = Answer('{"city": 1}', "stop")
BROKEN_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"required": [["city"], 3]}}}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"required": ["city"]}}}


def stream(*documents: Any) -> bytes:
    return b"".join(b"data: %b\r\n\r\n" % json.dumps(d).encode() for d in documents) + (
        b": ping\n\ndata: [DONE]\n\n"
    )


def delta(reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def call(index: int, **function: str) -> dict[str, Any]:
    return {"index": index, "function": function}


def test_documents_and_streams_give_the_same_answer() -> None:
    chat = {"choices": [{"index": 0, "message": {"content": "héllo"}, "finish_reason": "stop"}]}
    assert read_answer(json.dumps(chat).encode()) == Answer("héllo", "stop")
    parts = stream(delta(role="assistant"), delta(content="hé"), delta("stop", content="llo"))
    assert read_answer(parts) == Answer("héllo", "stop")
    usage = {"choices": [], "usage": {}}
    texts = stream({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, usage)
    assert read_answer(texts) == Answer("ab", "")


def test_tool_calls_are_joined_from_their_pieces() -> None:
    pieces = stream(
        delta(tool_calls=[call(0, name="weather", arguments="")]),
        delta(tool_calls=[call(0, arguments='{"ci'), call(1, name="time", arguments="{}")]),
        delta("tool_calls", tool_calls=[call(0, arguments='ty": 1}')]),
    )
    expected = (("weather", '{"city": 1}'), ("time", "{}"))
    assert read_answer(pieces) == Answer("", "tool_calls", expected)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"error": {"message": "x"}}',
        stream({"choices": [{"text": "a"}]}, {"error": {}}),
        b'{"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]}',
        b'{"choices": 3}',
    ],
)
def test_what_is_no_single_answer_is_left_alone(data: bytes) -> None:
    assert read_answer(data) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the cat sat. " * 30, True),
        ("word " + "a" * 250, True),
        ("ha " * 20, False),  # too short to be sure
        (" ".join(map(str, range(300))), False),
        ("abc" * 100 + "d", False),  # it got out
    ],
)
def test_loops(text: str, expected: bool) -> None:
    assert is_loop(text) is expected


@pytest.mark.parametrize(
    ("request_", "answer", "kind", "invalid"),
    [
        ({"prompt": "x"}, Answer("{", "stop"), "text", None),
        ({"messages": []}, Answer("{", "stop"), "chat", None),
        ({"response_format": SCHEMA}, Answer('{"city": 1}', "stop"), "json", False),
        ({"response_format": SCHEMA}, Answer('{"town": 1}', "stop"), "json", True),
        ({"response_format": SCHEMA}, Answer('{"city": 1', "length"), "json", True),
        ({"response_format": {"type": "json_object"}}, Answer("[1]", "stop"), "json", True),
        ({"response_format": {"type": "text"}}, Answer("[1]", "stop"), "text", None),
        ({"response_format": {"type": "json_schema", "json_schema": "x"}}, GOOD, "json", False),
        ({"response_format": BROKEN_SCHEMA}, GOOD, "json", False),
        ({"tools": 5}, GOOD, "tools", False),
        ({"tools": TOOLS}, Answer("no need", "stop"), "tools", False),
        ({"tools": TOOLS}, Answer("", "", (("weather", "{}"),)), "tools", False),
        ({"tools": TOOLS}, Answer("", "", (("wether", "{}"),)), "tools", True),
        ({"tools": TOOLS}, Answer("", "", (("weather", "{"),)), "tools", True),
    ],
)
def test_structure_is_judged_where_it_was_asked_for(
    request_: dict[str, Any], answer: Answer, kind: str, invalid: bool | None
) -> None:
    assert kind_of(request_) == kind
    found = faults(request_, answer, Answer("no need", "stop"))
    assert found == {
        "loop": False,
        "cut": answer.finish_reason == "length",
        "invalid": invalid,
    }


@pytest.mark.parametrize(
    ("answer", "other", "invalid"),
    [
        (Answer("the call as text", "stop"), Answer("", "", (("weather", "{}"),)), True),
        (Answer("the call as text", "stop"), Answer("", "", (("wether", "{}"),)), False),
        (Answer("", "", (("weather", "{}"),)), Answer("no need", "stop"), False),
    ],
)
def test_no_call_where_the_other_has_a_good_one_is_a_fault(
    answer: Answer, other: Answer, invalid: bool
) -> None:
    assert faults({"tools": TOOLS}, answer, other)["invalid"] is invalid
