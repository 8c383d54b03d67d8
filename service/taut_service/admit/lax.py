"""Numbers and switches as vLLM reads them: it takes ``"3"`` and ``3.0`` for 3, ``"true"`` for true.

vLLM's request models are pydantic's in lax mode; so what pydantic converts is accepted here as
well, and read alike. Source: pydantic, "Conversion Table", JSON input.
"""

from __future__ import annotations

import re
from typing import Any, Final

_INT: Final = re.compile(r"([+-]?\d+(?:_\d+)*)(?:\.0+)?", re.ASCII)
_MAX_DIGITS = 30
"""Longer numbers than any field may be."""
_TRUE: Final = frozenset({"true", "1", "on", "t", "y", "yes"})
_FALSE: Final = frozenset({"false", "0", "off", "f", "n", "no"})


def as_int(value: Any) -> int | None:
    """Return the integer that a JSON value stands for, None if it is none."""
    kind = type(value)
    if kind is int:
        return int(value)
    if kind is bool:
        return None
    if kind is float:
        return int(value) if value.is_integer() else None
    if kind is str:
        found = _INT.fullmatch(value.strip()) if len(value) <= _MAX_DIGITS else None
        return None if found is None else int(found[1])
    return None


def as_float(value: Any) -> float | None:
    """Return the number that a JSON value stands for, None if it is none."""
    kind = type(value)
    if kind is float:
        return float(value)
    if kind is bool or (kind is not int and kind is not str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def as_bool(value: Any) -> bool | None:
    """Return the switch that a JSON value stands for, None if it is none."""
    if value is True or value is False:
        return bool(value)
    if isinstance(value, (int, float)):
        return bool(value) if value in (0, 1) else None
    if isinstance(value, str):
        text = value.lower()
        return True if text in _TRUE else False if text in _FALSE else None
    return None
