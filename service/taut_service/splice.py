"""Puts the name a worker serves in the place of the name a client used; nothing else changes.

A body that already has the right name is passed on as the very same object. Otherwise the one
value is replaced in the bytes. Only where the bytes leave a doubt about which value it is (the
word ``"model"`` occurs twice, or escapes could hide it) is the document written anew, with the
same content.
"""

from __future__ import annotations

import json
import re
from typing import Any

_NAME = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\]|\\.)*")')
_KEY = b'"model"'
_ESCAPED_ASCII = b"\\u00"
"""Begins every escape that could spell ``model``."""


def with_model(body: bytes, document: dict[str, Any], name: str) -> bytes:
    """Return a request body that asks for another model.

    Args:
        body: as the client sent it.
        document: the same, parsed; an object with a string ``model``.
        name: the model to ask for.

    Returns:
        The body; ``body`` itself if it asks for ``name`` already.
    """
    if document["model"] == name:
        return body
    if body.count(_KEY) == 1 and _ESCAPED_ASCII not in body:
        found = _NAME.search(body)
        if found is not None:
            return body[: found.start(1)] + json.dumps(name).encode() + body[found.end(1) :]
    return json.dumps({**document, "model": name}).encode()
