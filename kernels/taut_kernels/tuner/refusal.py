"""What a published kernel raises for a shape it does not take, and how a report says so.

A rival that refuses is a note in the report and never the end of a run: hours of a borrowed card
hang on it. What it raises is not ours to choose.
"""

from __future__ import annotations

import triton

REFUSED = (RuntimeError, ValueError, TypeError, AssertionError, triton.TritonError)
"""`UnavailableError` of the rivals' modules, CUDA's errors and lack of memory are RuntimeErrors."""


def first_line(error: BaseException) -> str:
    """Return an error's first line, or its type where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
