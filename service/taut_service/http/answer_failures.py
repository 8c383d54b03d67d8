"""What a worker's failure means for a client, by how much of the answer is out."""

from __future__ import annotations

from taut_service.errors import UpstreamDeadlineError, UpstreamFailureError
from taut_service.worker.upstream_errors import StallError, UpstreamError


class CutShortError(Exception):
    """A long document broke off after its beginning was sent: close the client's connection."""


class NothingSentError(Exception):
    """An answer broke off before any of it was passed on: another worker may be asked.

    Args:
        cause: a metric label.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


def broken_before(error: UpstreamError) -> Exception:
    """Return what a failure means while nothing has been sent."""
    # After a time limit the work was probably done: it is not asked for again.
    return failure_of(error) if isinstance(error, StallError) else NothingSentError(error.cause)


def failure_of(error: UpstreamError) -> UpstreamFailureError:
    """Return what a client is told about a broken or silent worker."""
    if isinstance(error, StallError):
        return UpstreamDeadlineError("the worker did not answer in time", code="worker_timeout")
    return UpstreamFailureError(
        "the worker's answer broke off; send the request again", code="worker_lost"
    )
