"""What the gateway can know to be wrong with a request before a worker sees it.

The body is parsed once (:mod:`taut_service.http.json_body`) and never rewritten. Each field has one
small check that returns a reason or None; a field that is absent or null passes, a field not
listed passes, and what needs a tokenizer stays the worker's business. Limits that come from the
model are passed in, so a route is a table (:data:`COMPLETION_FIELDS`, …) and one required field.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from taut_service.admit.lax import as_bool, as_float, as_int
from taut_service.errors import NotFoundError, RequestError


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a configured model allows.

    Args:
        max_model_len: context length in tokens, prompt and completion together.
        max_prompt_chars: longest text prompt worth sending to the worker, in characters.
        max_choices: most answers to one prompt.
    """

    max_model_len: int
    max_prompt_chars: int
    max_choices: int = 128


MAX_TOKEN_ID = 2**31

Check = Callable[[Any, ModelLimits], str | None]
Fields = Mapping[str, Check]


def model_of(document: dict[str, Any], known: Mapping[str, object], only: str | None = None) -> str:
    """Return the requested model's name.

    Args:
        document: the parsed body.
        known: the configured models.
        only: the one model there is, for a request that names none; None if there are several.

    Returns:
        A key of ``known``.

    Raises:
        RequestError: ``model`` is missing or not a string.
        NotFoundError: no such model.
    """
    name = document.get("model")
    if name is None and only is not None:
        return only
    if name is None:
        raise RequestError("you must give 'model'", param="model", code="missing_required_field")
    if not isinstance(name, str):
        raise RequestError("'model' must be a string", param="model", code="invalid_type")
    if name not in known:
        shown = name if len(name) <= 100 else name[:100] + "…"
        raise NotFoundError(
            f"the model {shown!r} does not exist here", param="model", code="model_not_found"
        )
    return name


def check_fields(document: dict[str, Any], fields: Fields, limits: ModelLimits) -> None:
    """Run every check of a route.

    Args:
        document: the parsed body.
        fields: the route's table.
        limits: of the requested model.

    Raises:
        RequestError: for the first field that fails.
    """
    # A request has a handful of fields, a route's table three dozen.
    for name, value in document.items():
        check = fields.get(name)
        if check is not None and value is not None:
            reason = check(value, limits)
            if reason is not None:
                raise RequestError(f"'{name}' {reason}", param=name, code="invalid_value")


def require(document: dict[str, Any], *names: str) -> None:
    """Insist that one of the fields is there and not null.

    Args:
        document: the parsed body.
        *names: fields, the first of which is named in the error.

    Raises:
        RequestError: none of them is.
    """
    for name in names:
        if document.get(name) is not None:
            return
    raise RequestError(f"you must give '{names[0]}'", param=names[0], code="missing_required_field")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _boolean(value: Any, _: ModelLimits) -> str | None:
    return None if as_bool(value) is not None else "must be true or false"


def _integer(value: Any, _: ModelLimits) -> str | None:
    return None if as_int(value) is not None else "must be an integer"


def _at_least_one(value: Any, _: ModelLimits) -> str | None:
    number = as_int(value)
    if number is None:
        return "must be an integer"
    return None if number >= 1 else "must be at least 1"


def _choices(value: Any, limits: ModelLimits) -> str | None:
    reason = _at_least_one(value, limits)
    if reason is None and (as_int(value) or 0) > limits.max_choices:
        return f"is {value}, but at most {limits.max_choices} choices are given"
    return reason


def _token_budget(value: Any, limits: ModelLimits) -> str | None:
    reason = _at_least_one(value, limits)
    if reason is None and (as_int(value) or 0) > limits.max_model_len:
        return f"is {value}, but the model's context is {limits.max_model_len} tokens"
    return reason


def _budget_or_none(value: Any, limits: ModelLimits) -> str | None:
    return None if as_int(value) == 0 else _token_budget(value, limits)


def _number(low: float, high: float, words: str) -> Check:
    def check(value: Any, _: ModelLimits) -> str | None:
        number = as_float(value)
        if number is None:
            return "must be a number"
        # 1e999 is valid JSON and infinite.
        return None if low <= number <= high else words

    return check


def _stop(value: Any, _: ModelLimits) -> str | None:
    if isinstance(value, str):
        return None
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return None
    return "must be a string or a list of strings"


def _stop_sequences(value: Any, _: ModelLimits) -> str | None:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return None
    return "must be a list of strings"


def _text(value: str, limits: ModelLimits) -> str | None:
    if not value:
        return "must not be empty"
    if len(value) > limits.max_prompt_chars:
        context = f"a context of {limits.max_model_len} tokens"
        return f"has {len(value)} characters, more than {context} holds"
    return None


def _tokens(value: list[Any], limits: ModelLimits) -> str | None:
    if not all(_is_int(item) and 0 <= item < MAX_TOKEN_ID for item in value):
        return "must not mix token ids with anything else, and token ids are 31-bit integers"
    if len(value) > limits.max_model_len:
        return f"has {len(value)} tokens, but the model's context is {limits.max_model_len} tokens"
    return None


def _string(value: Any, _: ModelLimits) -> str | None:
    return None if isinstance(value, str) else "must be a string"


def _token_list(value: Any, limits: ModelLimits) -> str | None:
    return _tokens(value, limits) if isinstance(value, list) else "must be a list of token ids"


def _prompt(value: Any, limits: ModelLimits) -> str | None:
    if isinstance(value, str):
        return _text(value, limits)
    if not isinstance(value, list):
        return "must be a string, a list of strings, a list of token ids, or a list of such lists"
    if not value:
        return "must not be empty"
    if _is_int(value[0]):
        return _tokens(value, limits)
    for item in value:
        if isinstance(item, str):
            reason = _text(item, limits)
        elif isinstance(item, list):
            reason = _tokens(item, limits) if item else "must not hold an empty prompt"
        else:
            reason = (
                "must be a string, a list of strings, a list of token ids, or a list of such lists"
            )
        if reason is not None:
            return reason
    return None


def _messages(value: Any, limits: ModelLimits) -> str | None:
    if not isinstance(value, list):
        return "must be a list of messages"
    if not value:
        return "must not be empty"
    characters = 0
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            return f"[{i}] must be an object"
        if not isinstance(message.get("role"), str) or not message["role"]:
            return f"[{i}] must have a 'role' that is a string"
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            return f"[{i}] must have 'content' that is a string or a list of parts"
        characters += _characters(content)
    if characters > limits.max_prompt_chars:
        return f"hold {characters} characters, more than a context of {limits.max_model_len} tokens"
    return None


def _response_input(value: Any, limits: ModelLimits) -> str | None:
    if isinstance(value, str):
        return _text(value, limits)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return "must be a string or a list of objects"
    return None if value else "must not be empty"


def _not_in_background(value: Any, _: ModelLimits) -> str | None:
    wanted = as_bool(value)
    if wanted is None:
        return "must be true or false"
    # The answer would be kept by one worker, and fetched through a gateway that keeps nothing.
    return "is not offered: responses are not kept" if wanted else None


def _characters(content: str | list[Any] | None) -> int:
    if isinstance(content, str):
        return len(content)
    parts = content or ()
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return sum(len(text) for text in texts if isinstance(text, str))


def check_scoring(document: dict[str, Any]) -> None:
    """Refuse a completion of no tokens, unless the prompt itself is the answer (``echo``).

    Args:
        document: the parsed body, its fields checked.

    Raises:
        RequestError: ``max_tokens`` is 0 without ``echo``.
    """
    if as_int(document.get("max_tokens")) == 0 and as_bool(document.get("echo")) is not True:
        raise RequestError(
            "'max_tokens' must be at least 1 without 'echo'",
            param="max_tokens",
            code="invalid_value",
        )


SAMPLING_FIELDS: Fields = {
    "priority": _integer,
    "stream": _boolean,
    "max_tokens": _token_budget,
    "n": _choices,
    "temperature": _number(0, sys.float_info.max, "must be a finite number, 0 or more"),
    "top_p": _number(0, 1, "must be between 0 and 1"),
    "stop": _stop,
}
COMPLETION_FIELDS: Fields = {
    "prompt": _prompt,
    "best_of": _choices,
    **SAMPLING_FIELDS,
    "max_tokens": _budget_or_none,
}
CHAT_FIELDS: Fields = {
    "messages": _messages,
    "max_completion_tokens": _token_budget,
    **SAMPLING_FIELDS,
}
EMBEDDING_FIELDS: Fields = {"input": _prompt, "priority": _integer}
RESPONSE_FIELDS: Fields = {
    "priority": _integer,
    "input": _response_input,
    "background": _not_in_background,
    "max_output_tokens": _token_budget,
    "stream": _boolean,
    "temperature": SAMPLING_FIELDS["temperature"],
    "top_p": SAMPLING_FIELDS["top_p"],
}
MESSAGE_FIELDS: Fields = {
    "priority": _integer,
    "messages": _messages,
    "max_tokens": _token_budget,
    "stream": _boolean,
    "temperature": SAMPLING_FIELDS["temperature"],
    "top_p": SAMPLING_FIELDS["top_p"],
    "stop_sequences": _stop_sequences,
}
COUNT_FIELDS: Fields = {"messages": _messages}
TOKENIZE_FIELDS: Fields = {"prompt": _string, "messages": _messages}
DETOKENIZE_FIELDS: Fields = {"tokens": _token_list}
