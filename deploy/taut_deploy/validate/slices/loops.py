"""Whether an answer ends in an endless repetition, the way a damaged model fails to stop."""

_REPEATS = 4
_LONGEST = 40  # words in what is repeated
_LEAST = 16  # characters that the repetition takes up: "ha ha ha ha" is no loop


def ends_in_loop(text: str) -> bool:
    """Whether the end of the text is one phrase, four times or more.

    Phrases are counted in words; a text without spaces is looked at by characters.

    Args:
        text: the answer.
    """
    words = text.split()
    return _repeats(words) or (len(words) < _REPEATS and _repeats(list(text.strip())))


def _repeats(parts: list[str]) -> bool:
    for size in range(1, min(_LONGEST, len(parts) // _REPEATS) + 1):
        end = parts[-size * _REPEATS :]
        if len("".join(end)) >= _LEAST and end == end[-size:] * _REPEATS:
            return True
    return False
