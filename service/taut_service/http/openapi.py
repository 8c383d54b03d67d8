"""The OpenAPI document of the routes that the front answers without FastAPI.

The schemas say what the gateway checks (:mod:`taut_service.admit.request_checks`) and no more: a
body that fits is passed on, a worker may still refuse it. Names of models come from the
configuration in force.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from taut_service.call import ROUTES, Route
from taut_service.config.generation import Generation
from taut_service.config.reload import Reloader
from taut_service.http.dialect import ANTHROPIC

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string", "minLength": 1}
_TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TOKENS: Schema = {"type": "array", "items": _TOKEN, "minItems": 1}
_PROMPT: Schema = {
    "oneOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        _TOKENS,
        {"type": "array", "items": _TOKENS, "minItems": 1},
    ]
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": _TEXT,
        "content": {
            "oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
        },
    },
    "additionalProperties": True,
}
_MESSAGES: Schema = {"type": "array", "items": _MESSAGE, "minItems": 1}
_STRINGS: Schema = {"type": "array", "items": {"type": "string"}}
_BOOLEAN: Schema = {"type": "boolean"}
_UNIT: Schema = {"type": "number", "minimum": 0, "maximum": 1}
_TEMPERATURE: Schema = {"type": "number", "minimum": 0, "maximum": 2}
_PROPERTIES: dict[str, Schema] = {
    "background": {"type": "boolean", "enum": [False]},
    "best_of": {"type": "integer", "minimum": 1},
    "messages": _MESSAGES,
    "n": {"type": "integer", "minimum": 1},
    "prompt": _PROMPT,
    "stop": {"oneOf": [{"type": "string"}, _STRINGS]},
    "stop_sequences": _STRINGS,
    "stream": _BOOLEAN,
    "temperature": _TEMPERATURE,
    "tokens": _TOKENS,
    "top_p": _UNIT,
}
_BUDGETS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_INPUTS: dict[str, Schema] = {
    "embeddings": _PROMPT,
    "responses": {"oneOf": [_TEXT, {"type": "array", "items": {"type": "object"}, "minItems": 1}]},
}
_ERROR_SCHEMA: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR_SCHEMA: Schema = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
ERROR: Schema = {
    "description": "What is wrong, in OpenAI's shape",
    "content": {"application/json": {"schema": _ERROR_SCHEMA}},
}
_EVENT: Schema = {
    "description": "One server-sent event; its data is a JSON object, or [DONE]",
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
_STATUSES = {
    "400": "The request is wrong; it would be wrong again",
    "401": "The API key is missing, malformed or unknown",
    "403": "The key does not allow this",
    "404": "No such model, or the worker does not offer this route",
    "405": "The method is not POST",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "422": "The worker refused the request",
    "429": "Too many requests; Retry-After says when to come back",
    "502": "A worker took the request and failed",
    "503": "No worker is ready, or the gateway is ending",
    "504": "A worker did not answer in time",
}
_STREAMS = ("completions", "chat_completions", "responses", "messages")


def describe_routes(api: FastAPI, reloader: Reloader) -> None:
    """Add the routes to workers to an application's document.

    Args:
        api: the application.
        reloader: holds the configuration in force; the document follows it.
    """
    made_for = 0

    def describe() -> dict[str, Any]:
        nonlocal made_for
        generation = reloader.current
        if api.openapi_schema is None or made_for != generation.number:
            document = own_document(api)
            for route in ROUTES:
                document["paths"][route.path] = {"post": _operation(route, generation)}
            api.openapi_schema = document
            made_for = generation.number
        return api.openapi_schema

    # FastAPI's documented way to extend the document.
    api.openapi = describe  # type: ignore[method-assign]


def own_document(api: FastAPI) -> Schema:
    """Return the document of an application's own routes.

    FastAPI's 422 is taken out: what it would say comes as a 400 in the gateway's shape.

    Args:
        api: the application.
    """
    document = get_openapi(
        title=api.title, version=api.version, summary=api.summary, routes=api.routes
    )
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    schemas = document.get("components", {}).get("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document


def _operation(route: Route, generation: Generation) -> Schema:
    anthropic = route.dialect is ANTHROPIC
    error = _ANTHROPIC_ERROR_SCHEMA if anthropic else _ERROR_SCHEMA
    answers: Schema = {"application/json": {"schema": {"type": "object"}}}
    if route.name in _STREAMS:
        answers["text/event-stream"] = {"schema": _EVENT}
    return {
        "tags": ["inference"],
        "summary": route.summary,
        "operationId": route.name,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _request(route, generation)}},
        },
        "responses": {
            "200": {"description": "The worker's answer, unchanged", "content": answers},
            **{
                status: {"description": text, "content": {"application/json": {"schema": error}}}
                for status, text in _STATUSES.items()
            },
        },
    }


def _request(route: Route, generation: Generation) -> Schema:
    longest = min(model.limits.max_model_len for model in generation.models.values())
    budget = {"type": "integer", "minimum": 1, "maximum": longest}
    names = dict.fromkeys((*route.fields, *route.required, *route.also_required))
    properties = {name: _property(route, name, budget) for name in names}
    needed = ["model", *route.also_required]
    schema: Schema = {
        "type": "object",
        "properties": {"model": {"type": "string", "enum": list(generation.names)}, **properties},
        "additionalProperties": True,
    }
    if len(route.required) == 1:
        schema["required"] = [*needed, *route.required]
    else:
        schema["required"] = needed
        schema["anyOf"] = [{"required": [name]} for name in route.required]
    return schema


def _property(route: Route, name: str, budget: Schema) -> Schema:
    if name in _BUDGETS:
        return budget
    if route.name == "tokenize" and name == "prompt":
        return {"type": "string"}
    if name == "input":
        return _INPUTS[route.name]
    return _PROPERTIES.get(name, {})
