"""A long prompt with one sentence in it that the answer depends on.

After Kamradt, "Needle in a haystack", github.com/gkamradt/LLMTest_NeedleInAHaystack, 2023: the
sentence stands at a given depth of a text that has nothing to do with it, and is asked for at the
end.
"""

import re
from collections.abc import Sequence


def prompt_with_needle(
    filler: Sequence[int],
    needle: Sequence[int],
    question: Sequence[int],
    *,
    length: int,
    depth: float,
) -> list[int]:
    """Token ids of the prompt.

    Args:
        filler: ids of any text, repeated where it is too short.
        needle: ids of the sentence.
        question: ids of what the model is to complete.
        length: tokens of the whole prompt.
        depth: of the needle, 0 at the beginning and 1 at the end.

    Returns:
        ``length`` ids, or needle and question alone where those are longer.
    """
    room = max(length - len(needle) - len(question), 0)
    text = [filler[at % len(filler)] for at in range(room)]
    before = round(depth * room)
    return [*text[:before], *needle, *text[before:], *question]


def is_found(answer: str, expected: str) -> bool:
    """Whether the answer begins with what was hidden, case and signs in front aside."""
    return re.match(rf"\W*{re.escape(expected)}\b", answer, re.IGNORECASE) is not None
