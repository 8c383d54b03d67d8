"""A caller's limits as its requests meet them: reserve, tell where it stands, settle.

Tokens are reserved before the request is admitted, prompt and completion as estimated, and settled
when it has ended with what it used. Header names and the form of durations are OpenAI's (API
reference, "Rate limits").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from taut_service.admit.limits.bucket import MINUTE_S, LimitStore, RateLimit, Standing, wait_s
from taut_service.admit.limits.estimate import Estimate
from taut_service.admit.limits.memory import MemoryLimitStore
from taut_service.errors import Headers, RateLimitedError, RequestError

_REQUESTS: Final = (
    b"x-ratelimit-limit-requests",
    b"x-ratelimit-remaining-requests",
    b"x-ratelimit-reset-requests",
)
_TOKENS: Final = (
    b"x-ratelimit-limit-tokens",
    b"x-ratelimit-remaining-tokens",
    b"x-ratelimit-reset-tokens",
)


class Reservation:
    """What one request took from its caller's buckets. Settled exactly once.

    Args:
        store: where from.
        name: the caller.
        limit: its limit.
        estimate: what was taken.
        standing: where that left the caller; None if nobody knows, and then nothing was taken.
    """

    __slots__ = ("_limit", "_name", "_settled", "_store", "prompt", "standing", "tokens")

    def __init__(
        self,
        store: LimitStore,
        name: str,
        limit: RateLimit,
        estimate: Estimate,
        standing: Standing | None,
    ) -> None:
        self._store = store
        self._name = name
        self._limit = limit
        self._settled = standing is None
        self.prompt = estimate.prompt
        self.tokens = estimate.prompt + estimate.completion
        self.standing = standing

    def headers(self) -> Headers:
        """Return where the caller stands, for the answer."""
        if self.standing is None:
            return []
        return standing_headers(self._limit, self.standing)

    def settle(self, used_tokens: int) -> None:
        """Account for a request that reached a worker.

        Args:
            used_tokens: prompt and completion together.
        """
        self._settle(0, self.tokens - used_tokens)

    def cancel(self) -> None:
        """Give everything back: the gateway or a worker failed, not the caller."""
        self._settle(1, self.tokens)

    def _settle(self, requests: int, tokens: int) -> None:
        if not self._settled:
            self._settled = True
            if requests or tokens:
                self._store.settle(self._name, self._limit, requests, tokens)


class RateLimiter:
    """Reserves and refuses.

    Args:
        store: keeps the buckets.
        count: told ``requests`` or ``tokens`` for every request refused.
    """

    def __init__(self, store: LimitStore, count: Callable[[str], None]) -> None:
        self.store = store
        self._memory = store if isinstance(store, MemoryLimitStore) else None
        self._count = count

    def reserve_now(self, name: str, limit: RateLimit, estimate: Estimate) -> Reservation | None:
        """Do :meth:`reserve` where nothing has to be waited for; None where the store must be."""
        memory = self._memory
        if memory is None:
            return None
        tokens = self._checked(limit, estimate)
        return self._reserved(name, limit, estimate, memory.take_now(name, limit, tokens))

    async def reserve(self, name: str, limit: RateLimit, estimate: Estimate) -> Reservation:
        """Take one request and its tokens from a caller's buckets.

        Args:
            name: the caller.
            limit: its limit.
            estimate: what the request will cost.

        Returns:
            What was taken; the caller must settle or cancel it.

        Raises:
            RateLimitedError: there is not enough left.
            RequestError: there never will be: the request is larger than a minute's worth.
            UnavailableError: the store cannot be asked and lets nobody pass.
        """
        tokens = self._checked(limit, estimate)
        return self._reserved(name, limit, estimate, await self.store.take(name, limit, tokens))

    def _checked(self, limit: RateLimit, estimate: Estimate) -> int:
        """Return the tokens of a request that may be granted some time."""
        tokens = estimate.prompt + estimate.completion
        size = limit.tokens_per_minute
        if size is not None and tokens > size:
            self._count("tokens")
            raise RequestError(
                f"the request needs about {tokens} tokens, but this API key may use {size} a "
                "minute: shorten the prompt or lower max_tokens",
                param="max_tokens",
                code="request_exceeds_rate_limit",
            )
        return tokens

    def _reserved(
        self, name: str, limit: RateLimit, estimate: Estimate, standing: Standing | None
    ) -> Reservation:
        if standing is not None and not standing.granted:
            raise self._refusal(limit, standing, estimate.prompt + estimate.completion)
        return Reservation(self.store, name, limit, estimate, standing)

    def _refusal(self, limit: RateLimit, standing: Standing, tokens: int) -> RateLimitedError:
        requests_s = _until(standing.requests, limit.requests_per_minute, 1)
        tokens_s = _until(standing.tokens, limit.tokens_per_minute, tokens)
        if requests_s >= tokens_s:
            what, size = "requests", limit.requests_per_minute
        else:
            what, size = "tokens", limit.tokens_per_minute
        self._count(what)
        after_s = max(requests_s, tokens_s)
        return RateLimitedError(
            f"this API key may use {size} {what} a minute; try again in {duration(after_s)}",
            after_s,
            standing_headers(limit, standing),
        )


def _until(level: float, per_minute: int | None, needed: float) -> float:
    return 0.0 if per_minute is None else wait_s(level, per_minute, needed)


def standing_headers(limit: RateLimit, standing: Standing) -> Headers:
    """Return OpenAI's ``x-ratelimit-*`` headers.

    Args:
        limit: a caller's.
        standing: what is left.

    Returns:
        Three headers for each limit there is.
    """
    headers: Headers = []
    if limit.requests_per_minute is not None:
        headers += _three(_REQUESTS, limit.requests_per_minute, standing.requests)
    if limit.tokens_per_minute is not None:
        headers += _three(_TOKENS, limit.tokens_per_minute, standing.tokens)
    return headers


def _three(names: tuple[bytes, bytes, bytes], size: int, left: float) -> Headers:
    return [
        (names[0], b"%d" % size),
        (names[1], b"%d" % left if left > 0 else b"0"),
        (names[2], duration((size - left) * MINUTE_S / size).encode()),
    ]


def duration(seconds: float) -> str:
    """Write a duration as OpenAI does: ``17ms``, ``1.5s``, ``6m0s``.

    Args:
        seconds: 0 or more.
    """
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds > 0 else "0ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
