"""Whether an answer is JSON of the form that was asked for."""

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

_FENCE = "```"


def why_no_schema(schema: Any) -> str | None:
    """Why a schema cannot be used, None if it can."""
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return str(error.message)[:120]
    return None


def is_valid_json(text: str, schema: Mapping[str, Any]) -> bool:
    """Whether the whole answer is one JSON value that the schema takes.

    A fence of Markdown around it is what chat models are taught, and is taken off; words before or
    after it are not: a program that reads the answer would stop at them.

    Args:
        text: the answer.
        schema: JSON schema, draft 2020-12.
    """
    try:
        value = json.loads(_unfenced(text), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return bool(Draft202012Validator(schema).is_valid(value))


def _refuse(name: str) -> None:
    raise ValueError(name)  # NaN and infinity are Python's, not JSON's


def _unfenced(text: str) -> str:
    text = text.strip()
    if text.startswith(_FENCE) and text.endswith(_FENCE) and "\n" in text:
        return text[text.index("\n") : -len(_FENCE)]
    return text
