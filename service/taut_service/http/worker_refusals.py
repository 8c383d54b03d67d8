"""Refusals of a worker that speak of its command line, said for the person who sent the request.

A worker's other refusals are about the request and are passed on as they are. These name flags
that only an operator could set, and not the model.
"""

from __future__ import annotations

import json

from taut_service.errors import RequestError

# vLLM 0.26 to 0.33, of ``tool_choice`` "auto", "required" and a named function.
_NO_TOOL_PARSER = "--tool-call-parser to be set"


def refusal_of(model: str, body: bytes) -> RequestError | None:
    """Return what a client is told in the place of a worker's refusal.

    Args:
        model: public name.
        body: of the worker's answer, of status 4xx.

    Returns:
        None where the worker's own words will do.
    """
    if _NO_TOOL_PARSER.encode() not in body:
        return None
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    # At its end: what a client wrote may be quoted within a message.
    if not isinstance(message, str) or not message.endswith(_NO_TOOL_PARSER):
        return None
    return RequestError(
        f"the model {model!r} takes no tools, since its chat template knows of none: leave out "
        "'tools', or have it served with a template that does (taut serve -- --chat-template FILE)",
        param="tools",
        code="tools_not_supported",
    )
