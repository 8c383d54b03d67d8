"""The body: what is refused as text, and how the name of the model is replaced in it."""

from __future__ import annotations

import json

import pytest

from taut_service.errors import RequestError
from taut_service.request_checks import parse_body
from taut_service.splice import with_model


def spliced(body: bytes, name: str = "served") -> bytes:
    return with_model(body, json.loads(body), name)


def test_right_name_passes_the_same_bytes() -> None:
    body = b'{ "model" : "served" }'
    assert spliced(body) is body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"chat"}', b'{"model":"served"}'),
        (b'{"a":1e5, "model" :\t"chat" ,"b":[1.0]}', b'{"a":1e5, "model" :\t"served" ,"b":[1.0]}'),
        (b'{"model":"ch\\"at\\\\"}', b'{"model":"served"}'),
        ('{"model":"é","x":"é"}'.encode(), '{"model":"served","x":"é"}'.encode()),
        (
            b'{"x":"\\"model\\": \\"no\\"","model":"c"}',
            b'{"x":"\\"model\\": \\"no\\"","model":"served"}',
        ),
    ],
)
def test_only_the_value_is_replaced(body: bytes, expected: bytes) -> None:
    assert spliced(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"chat","messages":[{"role":"model","model":"x"}]}',
        b'{"metadata":{"model":"chat"},"model":"chat"}',
        b'{"model":"first","model":"chat"}',
        b'{"mod\\u0065l":"chat","user":"model"}',
        b'{"mod\\u0065l":"chat","x":{"model":"chat"}}',
        b'{"model":"chat","x":"\\ud83d\\ude00 \\u00e9"}',
    ],
)
def test_where_there_is_doubt_the_content_is_the_same(body: bytes) -> None:
    assert json.loads(spliced(body)) == {**json.loads(body), "model": "served"}


def test_name_that_needs_escapes() -> None:
    assert json.loads(spliced(b'{"model":"a"}', 'q"\\')) == {"model": 'q"\\'}


@pytest.mark.parametrize("escape", [b"\\ud83d\\ude00", b"\\uD83D\\uDE00", b"\\\\ud800", b"\\u00e9"])
def test_whole_characters_in_escapes_are_accepted(escape: bytes) -> None:
    assert parse_body(b'{"model":"m","prompt":"' + escape + b'"}')["model"] == "m"


@pytest.mark.parametrize("escape", [b"\\ud800", b"\\uDC00", b"\\ude00\\ud83d", b"\\ud83dx"])
def test_half_a_surrogate_pair_is_refused(escape: bytes) -> None:
    for body in (b'{"prompt":"%b"}', b'{"a":[{"%b":1}]}'):
        with pytest.raises(RequestError, match="surrogate"):
            parse_body(body % escape)
