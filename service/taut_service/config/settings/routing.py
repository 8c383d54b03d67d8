"""How requests are spread over workers, and what happens when a worker fails."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from taut_service.config.settings.fields import Count, Fraction, Seconds, Section


class Timeouts(Section):
    """Limits on waiting for one request.

    ``first_byte_s`` and ``idle_s`` count bytes, ``first_token_s`` and ``gap_s`` count events of a
    stream: a worker that sends nothing but keep-alive comments is stopped by the latter. Where
    the latter are not given, the former are used for both. ``idle_s`` also bounds the silence of
    a client within its body. A client that takes nothing of its answer for ``write_s``, or fewer
    than ``write_min_bytes_per_s`` over that time, is cut off: it holds a place at a worker. An
    answer that has ended holds none; what its client has not taken ``unread_s`` later is held to
    the same. ``keep_alive_s`` is how long a connection is kept for its next request: longer than
    clients and balancers keep one (httpx 5 s, aiohttp 15 s, nginx and AWS 60 s), since whoever
    ends it first meets no request on its way.
    """

    connect_s: Seconds = 2.0
    first_byte_s: Seconds = 300.0
    first_token_s: Seconds | None = None
    idle_s: Seconds = 120.0
    gap_s: Seconds | None = None
    total_s: Seconds = 1800.0
    write_s: Seconds = 30.0
    write_min_bytes_per_s: Annotated[int, Field(ge=0)] = 1024
    unread_s: Seconds = 5.0
    keep_alive_s: Seconds = 75.0

    @model_validator(mode="after")
    def _unread_is_seen_before_the_end(self) -> Timeouts:
        if self.unread_s > self.keep_alive_s:
            raise ValueError("unread_s must not be longer than keep_alive_s")
        return self


class Retries(Section):
    """How often a request may be sent again before the first byte of an answer.

    The budget is a token bucket over all requests of a model: each request puts ``budget_ratio``
    of a retry into it, time puts ``budget_min_per_s`` into it, each retry takes one out. So a
    storm of failures costs at most a share of the traffic. It holds ``budget_burst`` at most, and
    at the start: enough for all requests of a worker that is killed. A failed connection attempt
    costs nothing, since no worker has done anything for it.
    """

    max_tries: Annotated[int, Field(ge=1, le=10)] = 3
    budget_ratio: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.2
    budget_min_per_s: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 10.0
    budget_burst: Annotated[int, Field(ge=0, le=1_000_000)] = 256


class Breaker(Section):
    """When a worker is left alone: ``failures`` within ``window_s``, for ``open_s`` seconds.

    They must also be ``failure_ratio`` of all outcomes since the first of them. After that one
    request tries it; its success closes the breaker, its failure opens it again.
    """

    failures: Count = 5
    failure_ratio: Fraction = 0.5
    window_s: Seconds = 10.0
    open_s: Seconds = 5.0


class Hedge(Section):
    """A second copy of a request that is not streamed, on another worker, after ``after_s``.

    None never sends one. A hedge is paid from the retry budget.
    """

    after_s: Seconds | None = None


class WorkerLoad(Section):
    """How the load that workers report on ``/metrics`` is used.

    ``every_s`` is the pause between two scrapes of a worker, None never scrapes; a worker that is
    the only one of its model name is not scraped, since its load decides nothing. A figure older
    than ``stale_after_s`` is ignored.
    """

    every_s: Seconds | None = 1.0
    stale_after_s: Seconds = 5.0


class Routing(Section):
    """Everything between the choice of a worker and its first byte."""

    retries: Retries = Retries()
    breaker: Breaker = Breaker()
    hedge: Hedge = Hedge()
    load: WorkerLoad = WorkerLoad()
    session_header: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")] = "x-session-id"


class Affinity(Section):
    """What sends requests that have something in common to the same worker.

    ``prefix`` hashes the first ``max_blocks`` blocks of ``block_chars`` characters of the prompt.
    A worker that holds more than ``max_load_ratio`` times the mean of its variant is passed over,
    so that a popular prefix spreads; one that holds fewer than ``min_requests`` never is.
    """

    by: Literal["none", "prefix", "session", "key"] = "none"
    block_chars: Annotated[int, Field(ge=16, le=1_000_000)] = 256
    max_blocks: Annotated[int, Field(ge=1, le=64)] = 8
    min_requests: Annotated[int, Field(ge=0, le=100_000)] = 4
    max_load_ratio: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] = 1.5
