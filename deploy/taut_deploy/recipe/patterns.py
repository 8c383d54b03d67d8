"""Patterns over full layer names: shell wildcards, or ``re:`` with a regular expression.

``re:`` is read as compressed-tensors and vLLM read it: the expression matches from the beginning
of the name and need not reach its end.
"""

import fnmatch
import re
from typing import Annotated

from pydantic import AfterValidator

_REGULAR = "re:"


def _compiles(pattern: str) -> str:
    if pattern.startswith(_REGULAR):
        try:
            re.compile(pattern.removeprefix(_REGULAR))
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression ({error})") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]


def matches(name: str, pattern: str) -> bool:
    """Say whether a layer's full name matches one pattern.

    Args:
        name: for example ``model.layers.0.mlp.down_proj``.
        pattern: shell wildcards, or ``re:`` and a regular expression.
    """
    if pattern.startswith(_REGULAR):
        return re.match(pattern.removeprefix(_REGULAR), name) is not None
    return fnmatch.fnmatchcase(name, pattern)


def is_matched(name: str, patterns: tuple[str, ...]) -> bool:
    """Say whether a layer's full name matches any of the patterns."""
    return any(matches(name, pattern) for pattern in patterns)
