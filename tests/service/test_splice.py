"""The body: what is refused as text, and how the name of the model is replaced in it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from taut_service.errors import RequestError
from taut_service.http.json_body import parse_body
from taut_service.http.splice import find_models, model_edits, moved, with_edits


def spliced(body: bytes, name: str = "served") -> bytes:
    return with_edits(body, model_edits(body, find_models(body), name))


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


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            b'{"model":"a", "x":1e999,"mod\\u0065l" : "b" ,"y":-1E+400}',
            b'{"model":"served", "x":1e999,"mod\\u0065l" : "served" ,"y":-1E+400}',
        ),
        (
            b'{ "model":"a","t":[{"model":"t","n":1.0e2}], "model":"b" }',
            b'{ "model":"served","t":[{"model":"t","n":1.0e2}], "model":"served" }',
        ),
        (
            '{"é":"\\u006dodel","model":"a","é":{"model":"é"}}'.encode(),
            '{"é":"\\u006dodel","model":"served","é":{"model":"é"}}'.encode(),
        ),
        (b'{"model":"served","model":["a"]}', b'{"model":"served","model":"served"}'),
    ],
)
def test_doubt_changes_no_other_byte(body: bytes, expected: bytes) -> None:
    assert spliced(body) == expected


def test_a_second_name_takes_the_place_of_the_first() -> None:
    body = b'{"model":"a","x":{"model":1},"model":"b"}'
    places = find_models(body)
    edits = model_edits(body, places, "a longer name")
    once, places = with_edits(body, edits), moved(places, edits)
    assert (
        with_edits(once, model_edits(once, places, "s"))
        == b'{"model":"s","x":{"model":1},"model":"s"}'
    )


KEYS = st.sampled_from(["model", "x"]) | st.text(max_size=5)


@hypothesis_settings(max_examples=200, deadline=None, derandomize=True)
@given(
    pairs=st.lists(
        st.tuples(
            KEYS,
            st.recursive(
                st.integers()
                | st.text(max_size=9)
                | st.floats(allow_nan=False, allow_infinity=False),
                lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
                max_leaves=5,
            ),
        ),
        max_size=6,
    ),
    space=st.sampled_from(["", " ", "\n\t "]),
    ascii_only=st.booleans(),
)
def test_only_models_change_in_any_object(
    pairs: list[tuple[str, object]], space: str, ascii_only: bool
) -> None:
    def text(name: object) -> bytes:
        members = [
            f"{json.dumps(key, ensure_ascii=ascii_only)}{space}:{space}"
            + json.dumps(name if key == "model" and name else value, ensure_ascii=ascii_only)
            for key, value in [("model", "first"), *pairs]
        ]
        return f"{space}{{{space}{f'{space},'.join(members)}{space}}}{space}".encode()

    assert spliced(text(None)) == text("served")


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
