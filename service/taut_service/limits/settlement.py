"""What a request is charged when it has ended."""

from __future__ import annotations

from taut_service.call import CLIENT_CLOSED, Call
from taut_service.limits.limiter import Reservation


def settle(call: Call, reservation: Reservation) -> None:
    """Settle what a request reserved.

    The worker's own count decides where there is one. Without it a stream is charged its prompt, as
    estimated, and one token for each event that was passed on. A document whose client left is
    charged all that was reserved: nobody knows how far the worker had come, and leaving early
    would otherwise be free. What the gateway or a worker failed to answer costs nothing, what a
    worker refused costs the request but no tokens.

    Args:
        call: ended; its ``status`` is what the client was told.
        reservation: what it took.
    """
    usage = call.usage
    if not call.worker:
        reservation.cancel()
    elif usage is not None:
        reservation.settle(usage.prompt_tokens + usage.completion_tokens)
    elif call.streaming:
        reservation.settle(reservation.prompt + call.events)
    elif call.status in (0, CLIENT_CLOSED):
        reservation.settle(reservation.tokens)
    elif call.status >= 500:
        reservation.cancel()
    elif call.status >= 400:
        reservation.settle(0)
    else:
        reservation.settle(reservation.tokens)
