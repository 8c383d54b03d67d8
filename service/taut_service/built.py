"""Whether the gateway's hot path was compiled (``service/compile.py``) or is run by Python."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from typing import Literal

from taut_service.http import sse


def how_built() -> Literal["compiled", "python"]:
    """Say which of the two runs here; no module of the hot path is compiled without the others."""
    return "compiled" if sse.__file__.endswith(tuple(EXTENSION_SUFFIXES)) else "python"
