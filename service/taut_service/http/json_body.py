"""Parses a request body: strict JSON in UTF-8, an object.

A large one is parsed beside the event loop. The parser of the standard library keeps the
interpreter to itself from the first byte to the last, unless it calls Python code: so numbers and
objects of a large body go through functions that do nothing, and between two of them the event
loop gets its turn.
"""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

from taut_service.errors import RequestError

_KINDS: Final[dict[type, str]] = {
    list: "an array",
    str: "a string",
    bool: "true or false",
    type(None): "null",
    int: "a number",
    float: "a number",
}
"""JSON's words for what a body may hold beside an object."""
_NO_NUMBER: Final = " is no number there"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name + _NO_NUMBER)


def _give_way_object(value: dict[str, Any]) -> dict[str, Any]:
    return value


def _give_way_int(text: str) -> int:
    return int(text)


def _give_way_float(text: str) -> float:
    return float(text)


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)
DECODER_THAT_GIVES_WAY = json.JSONDecoder(
    parse_constant=_refuse_constant,
    object_hook=_give_way_object,
    parse_int=_give_way_int,
    parse_float=_give_way_float,
)


def parse_body(body: bytes, *, give_way: bool = False) -> dict[str, Any]:
    """Parse a request body: strict JSON, UTF-8, an object.

    Args:
        body: the bytes as they came.
        give_way: let other threads run meanwhile; slower.

    Returns:
        The object.

    Raises:
        RequestError: it is not that.
    """
    try:
        document = _decoded(body.decode(), DECODER_THAT_GIVES_WAY if give_way else _DECODER)
    except UnicodeDecodeError as error:
        raise RequestError("the request body is not UTF-8", code="invalid_json") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        text = f"the request body is not valid JSON: {error.msg} at {where}"
        raise RequestError(text, code="invalid_json") from error
    except (ValueError, RecursionError) as error:
        text = f"the request body is not acceptable JSON: {_why_not(error)}"
        raise RequestError(text, code="invalid_json") from error
    if b"\\" in body:
        _refuse_lone_surrogates(document)
    if not isinstance(document, dict):
        kind = _KINDS[type(document)]
        raise RequestError(f"the request body must be a JSON object, not {kind}")
    return document


def _why_not(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "its brackets are nested too deep"
    if str(error).endswith(_NO_NUMBER):
        return str(error)
    return "a number has thousands of digits"


def _decoded(text: str, decoder: json.JSONDecoder) -> Any:
    if text[:1] == "{":
        # ``decode`` looks for space before and after with a regular expression each.
        document, end = decoder.raw_decode(text)
        if end == len(text) or not text[end:].strip(" \t\r\n"):
            return document
    return decoder.decode(text)


def _refuse_lone_surrogates(document: Any) -> None:
    """Refuse half of a surrogate pair: no UTF-8 text holds it, and a worker's tokenizer fails."""
    # A walk over the values: looking for the escape in the bytes costs 0.1 ms for 128 KiB.
    waiting = [document]
    try:
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                # Python keeps note of what is ASCII; only the rest is looked at.
                if not value.isascii():
                    value.encode()
            elif isinstance(value, dict):
                waiting += value
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value
    except UnicodeEncodeError as error:
        text = "the request body holds half of a surrogate pair (\\ud800 to \\udfff)"
        raise RequestError(text, code="invalid_json") from error
