"""The page at ``/docs``: the OpenAPI document as plain HTML.

No script and nothing from another host, so that it works behind any wall; the Content-Security-
Policy says so to the browser. Every text of the document is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "details{border:1px solid #999;border-radius:4px;margin:.5rem 0;padding:.4rem .8rem}"
    "summary{cursor:pointer}pre{overflow:auto;padding:.6rem;border:1px solid #ccc}"
    "th,td{text-align:left;vertical-align:top;padding:.1rem 1rem .1rem 0}"
)
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_EXAMPLES: Mapping[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 64,
    "prompt": "Hello",
    "input": "Hello",
    "tokens": [1, 2, 3],
}


def add_docs(api: FastAPI) -> None:
    """Serve the page at ``/docs``; the application was made without FastAPI's own pages."""

    @api.get("/docs", include_in_schema=False)
    async def read_docs() -> Response:
        return Response(render(api.openapi()), media_type="text/html", headers=HEADERS)


def render(document: Mapping[str, Any]) -> str:
    """Write an OpenAPI document as a page.

    Args:
        document: OpenAPI 3.1, as FastAPI makes it.

    Returns:
        HTML whose only link is the relative one to the document itself.
    """
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    operations = [
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{escape(info.get('summary', ''))}. The same for programs: "
        f'<a href="openapi.json">openapi.json</a>.</p>{"".join(operations)}</body></html>'
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    head = f"<code>{escape(method.upper())} {escape(path)}</code>"
    parts = [f"<details><summary>{head} {escape(operation.get('summary', ''))}</summary>"]
    if operation.get("parameters"):
        rows = [
            (each["name"], each["in"], json.dumps(each.get("schema", {})))
            for each in operation["parameters"]
        ]
        parts.append("<h3>Parameters</h3>" + _table(rows))
    schema = _json_schema(operation.get("requestBody", {}))
    if schema is not None:
        parts.append(_body(path, schema))
    responses = [
        (status, answer.get("description", ""), ", ".join(answer.get("content", {})))
        for status, answer in operation.get("responses", {}).items()
    ]
    parts.append("<h3>Answers</h3>" + _table(responses) + "</details>")
    return "".join(parts)


def _body(path: str, schema: Mapping[str, Any]) -> str:
    needed = _needed(schema)
    fields = [
        (name, "required" if name in needed else "", json.dumps(field))
        for name, field in schema.get("properties", {}).items()
    ]
    call = f"curl $GATEWAY{path} -H 'content-type: application/json' -d '{_example(schema)}'"
    return f"<h3>Body</h3>{_table(fields)}<h3>Example</h3><pre>{escape(call)}</pre>"


def _needed(schema: Mapping[str, Any]) -> list[str]:
    """What must be there; of several choices, the first."""
    choices = schema.get("anyOf", [{}])
    return [*schema.get("required", ()), *choices[0].get("required", ())]


def _example(schema: Mapping[str, Any]) -> str:
    properties = schema.get("properties", {})
    body = {
        name: properties[name]["enum"][0]
        if properties.get(name, {}).get("enum")
        else _EXAMPLES.get(name, "…")
        for name in _needed(schema)
    }
    return json.dumps(body, ensure_ascii=False)


def _json_schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    schema: Mapping[str, Any] | None = (
        body.get("content", {}).get("application/json", {}).get("schema")
    )
    return schema


def _table(rows: Sequence[Sequence[str]]) -> str:
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"
