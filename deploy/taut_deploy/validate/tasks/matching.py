"""Whether a written answer is right: pure functions of two texts."""

import re
from collections.abc import Sequence

from taut_deploy.validate.tasks.items import Match


def is_right(answer: str, references: Sequence[str], match: Match) -> bool:
    """Compare an answer with the references.

    Args:
        answer: as written.
        references: one is to match; patterns for ``regex``.
        match: ``exact`` compares after runs of white space became one space, ``contains`` looks for
            the reference anywhere, ``regex`` searches for the pattern.
    """
    if match == "regex":
        return any(re.search(pattern, answer) for pattern in references)
    said = _squeezed(answer)
    if match == "contains":
        return any(_squeezed(reference) in said for reference in references)
    return any(said == _squeezed(reference) for reference in references)


def _squeezed(text: str) -> str:
    return " ".join(text.split())
