"""Hooks of the schemathesis run in ``test_fuzz_openapi.py``: most bodies name a model that exists.

Left alone, schemathesis invents model names and nothing gets past the 404.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Put the served model's name into three bodies of four that have a textual one."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        digest = zlib.crc32(json.dumps(body, default=str, sort_keys=True).encode())
        if digest % 4:
            return {**body, "model": "m"}
    return body
