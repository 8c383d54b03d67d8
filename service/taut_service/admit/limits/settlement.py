"""What a request is charged when it has ended."""

from __future__ import annotations

from taut_service.admit.limits.estimate import BYTES_PER_TOKEN
from taut_service.admit.limits.limiter import Reservation
from taut_service.call import CLIENT_CLOSED, Call
from taut_service.http.sse import Usage


def settle(call: Call, reservation: Reservation) -> None:
    """Settle what a request reserved.

    The worker's own count decides where there is one. Without it a stream is charged its prompt, as
    estimated, and one token for each event that was passed on or for ``BYTES_PER_TOKEN`` bytes of
    its text, whichever is more: an event may hold many tokens. So is a stream that broke off, if
    the worker's last count is less: some count the prompt first. A document whose client left is
    charged all that was reserved: nobody knows how far the worker had come, and leaving early
    would otherwise be free. What the gateway or a worker failed to answer costs nothing, what a
    worker refused costs the request but no tokens.

    Args:
        call: ended; its ``status`` is what the client was told.
        reservation: what it took.
    """
    usage = call.answer.usage
    if not call.routed.worker:
        reservation.cancel()
    elif call.streaming:
        reservation.settle(_streamed(call, usage, reservation.prompt))
    elif usage is not None:
        reservation.settle(usage.prompt_tokens + usage.completion_tokens)
    elif call.answer.status in (0, CLIENT_CLOSED):
        reservation.settle(reservation.tokens)
    elif call.answer.status >= 500:
        reservation.cancel()
    elif call.answer.status >= 400:
        reservation.settle(0)
    else:
        reservation.settle(reservation.tokens)


def _streamed(call: Call, usage: Usage | None, prompt: int) -> int:
    """Return the tokens of a stream."""
    counted = max(call.answer.events, call.answer.text_bytes // BYTES_PER_TOKEN)
    if usage is None:
        return prompt + counted
    ended_whole = 200 <= call.answer.status < 300
    completion = usage.completion_tokens
    return usage.prompt_tokens + (completion if ended_whole else max(completion, counted))
