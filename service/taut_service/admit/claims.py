"""What a request may ask of admission: its class, its share, how long its client will wait.

``X-Taut-Priority: high|normal|low`` chooses the class; a lower one than the key's own is always
allowed, a higher one needs the scope ``priority:high``. Without configured keys any class is.
``X-Request-Timeout: SECONDS`` bounds the whole request; it can only shorten what is configured.
"""

from __future__ import annotations

import math
import time

from taut_service.admit.admission import Claim
from taut_service.admit.auth import Caller, parse_priority
from taut_service.admit.fair_queue import Priority
from taut_service.call import Call
from taut_service.errors import RequestError
from taut_service.http.headers import RequestHeaders

MAX_TIMEOUT_S = 86_400.0
QUEUE_SHARE = 0.95
"""Part of the client's time that may pass in the queue: the refusal must still reach it."""


def timeout_of(headers: RequestHeaders) -> float | None:
    """Read ``X-Request-Timeout``.

    Args:
        headers: the client's.

    Returns:
        Seconds, None where it is not given.

    Raises:
        RequestError: it is not a positive number of seconds.
    """
    value = headers.timeout
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise RequestError(
            f"X-Request-Timeout must be a number of seconds, at most {MAX_TIMEOUT_S:g}",
            code="invalid_value",
        )
    return seconds


def claim_of(
    call: Call,
    caller: Caller | None,
    headers: RequestHeaders,
    timeout_s: float | None,
    tokens: int,
) -> Claim:
    """Return what a request claims.

    Args:
        call: when it began.
        caller: whose it is, None without keys.
        headers: the client's.
        timeout_s: of the client, for the whole request.
        tokens: prompt and completion, as estimated.

    Raises:
        RequestError: the priority is not one.
        ForbiddenError: the caller may not ask for that priority.
    """
    wait_s = None
    if timeout_s is not None:
        elapsed_s = time.perf_counter() - call.started
        wait_s = max(0.0, timeout_s * QUEUE_SHARE - elapsed_s)
    asked = headers.priority
    if caller is None:
        priority = Priority.NORMAL if asked is None else parse_priority(asked)
        return Claim(tokens, "", 1.0, priority, wait_s)
    return Claim(tokens, caller.name, caller.weight, caller.priority_for(asked), wait_s)
