"""What libraries raise when memory is over, told apart from other faults.

torch raises ``OutOfMemoryError`` for a card and a plain ``RuntimeError`` for the host, of its
allocator or of a file that it maps; both would pass for a fault of the model where such errors are
caught.
"""

import errno
import re

_HOST = re.compile(r"can(?:'|no)t allocate memory", re.IGNORECASE)
_CARD = "OutOfMemoryError"
_ASKED = re.compile(r"tried to allocate ([0-9.]+ \w+)", re.IGNORECASE)


def where_memory_is_over(error: BaseException) -> str | None:
    """Say whose memory an error found used up.

    Args:
        error: any.

    Returns:
        ``the card`` or ``this machine``; None where it tells of something else.
    """
    # By name: the command line does not import torch.
    if any(kind.__name__ == _CARD for kind in type(error).__mro__):
        return "the card"
    if isinstance(error, RuntimeError):
        over = _HOST.search(str(error)) is not None
    else:
        over = isinstance(error, MemoryError) or (
            isinstance(error, OSError) and error.errno == errno.ENOMEM
        )
    return "this machine" if over else None


def let_pass(error: BaseException) -> None:
    """Raise an error again that tells of memory; for handlers that name another cause."""
    if where_memory_is_over(error) is not None:
        raise error


def describe(error: BaseException, place: str) -> str:
    """Return one line for who ran out of memory.

    Args:
        error: that tells of it.
        place: of :func:`where_memory_is_over`.
    """
    asked = _ASKED.search(str(error))
    more = f" ({asked[1]} more were asked for)" if asked else ""
    way_out = "close what else uses it, or ask for fewer or shorter sequences or a smaller batch"
    return f"the memory of {place} is used up{more}; {way_out}"
