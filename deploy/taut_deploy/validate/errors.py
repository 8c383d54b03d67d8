"""The one error of this package: it could not run, which is neither a pass nor a fail."""

from taut_deploy.errors import TautError


class CouldNotValidateError(TautError):
    """The comparison was not made; the message is one line naming the input and the way out.

    The command line prints the message and exits with ``exit_code``.
    """

    exit_code = 3


class NotOfferedError(CouldNotValidateError):
    """A model has no such ability (tools, conversations): what needs it is not judged."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception's message on a single line of at most ``limit`` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
