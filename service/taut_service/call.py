"""One request on its way through the gateway, and the routes it can take."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from taut_service.admit.auth import Caller
from taut_service.admit.byte_budget import HeldBytes
from taut_service.admit.limits.limiter import Reservation
from taut_service.admit.request_checks import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    COUNT_FIELDS,
    DETOKENIZE_FIELDS,
    EMBEDDING_FIELDS,
    MESSAGE_FIELDS,
    RESPONSE_FIELDS,
    TOKENIZE_FIELDS,
    Fields,
)
from taut_service.errors import Headers
from taut_service.http.client_exchange import ClientExchange
from taut_service.http.dialect import ANTHROPIC, OPENAI, RESPONSES, Dialect
from taut_service.http.rewrite import Rewrite
from taut_service.http.sse import Usage
from taut_service.watch.metrics import RouteMetrics

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from taut_service.guard.tap import Tap

CLIENT_CLOSED: Final = 499
"""Status in the log of a request whose client left; never sent."""


@dataclass(frozen=True, slots=True)
class Route:
    """A path that is passed on to a worker.

    Args:
        path: the same here and there.
        name: metric label.
        fields: checks of body fields.
        required: one of these fields must be given.
        optional: a worker may lack it; its 404 then gets a clear text.
        summary: one line for the API documentation.
        also_required: each of these fields must be given as well.
        dialect: the shape of its errors.
        preamble: events of a stream that a worker sends before it has begun to compute.
        stream_usage: a worker tells the usage of a stream only if ``stream_options`` ask for it.
    """

    path: str
    name: str
    fields: Fields
    required: tuple[str, ...]
    summary: str
    optional: bool = False
    also_required: tuple[str, ...] = ()
    dialect: Dialect = OPENAI
    preamble: int = 0
    stream_usage: bool = False


ROUTES = (
    Route(
        "/v1/completions",
        "completions",
        COMPLETION_FIELDS,
        ("prompt", "prompt_embeds"),
        "Complete a text prompt; streamed if 'stream' is true",
        stream_usage=True,
    ),
    Route(
        "/v1/chat/completions",
        "chat_completions",
        CHAT_FIELDS,
        ("messages",),
        "Answer a conversation; streamed if 'stream' is true",
        stream_usage=True,
    ),
    Route(
        "/v1/responses",
        "responses",
        RESPONSE_FIELDS,
        ("input",),
        "Answer in OpenAI's Responses shape; streamed if 'stream' is true",
        dialect=RESPONSES,
        # response.created and response.in_progress.
        preamble=2,
    ),
    Route(
        "/v1/messages",
        "messages",
        MESSAGE_FIELDS,
        ("messages",),
        "Answer in Anthropic's Messages shape; streamed if 'stream' is true",
        optional=True,
        also_required=("max_tokens",),
        dialect=ANTHROPIC,
    ),
    Route(
        "/v1/messages/count_tokens",
        "count_tokens",
        COUNT_FIELDS,
        ("messages",),
        "Count the tokens of a Messages request, where the worker does",
        optional=True,
        dialect=ANTHROPIC,
    ),
    Route(
        "/v1/embeddings",
        "embeddings",
        EMBEDDING_FIELDS,
        ("input", "messages"),
        "Embed text, where the worker does",
        optional=True,
    ),
    Route(
        "/tokenize",
        "tokenize",
        TOKENIZE_FIELDS,
        ("prompt", "messages"),
        "Count and list the tokens of a text, where the worker does",
        optional=True,
    ),
    Route(
        "/detokenize",
        "detokenize",
        DETOKENIZE_FIELDS,
        ("tokens",),
        "Turn token ids into text, where the worker does",
        optional=True,
    ),
)


# What a step adds. Attributes begin as the class has them: what a request does not do costs nothing


class Admitted:
    """Who asks, and what the request holds of the gateway's bounds; written by its checks."""

    caller: str | None = None
    key: Caller | None = None
    holds_key_place: bool = False
    reservation: Reservation | None = None
    held: HeldBytes | None = None


class Routed:
    """Where the request went; written by routing, try by try."""

    variant: str = ""
    worker: str = ""
    tries: int = 0


class Answer:
    """What the client got, and when; written by the relay."""

    status: int = 0
    events: int = 0
    text_bytes: int = 0
    first_token_s: float = 0.0
    rest_s: float = 0.0
    usage: Usage | None = None


class Call:
    """One request, and what each step of its way says about it; for the log and the metrics.

    Args:
        route: the route taken.
        request_id: checked or made.
        metrics: children to account to; replaced once the model is known.
    """

    __slots__ = (
        "admitted",
        "answer",
        "exchange",
        "extra_headers",
        "metrics",
        "model",
        "request_id",
        "rewrite",
        "route",
        "routed",
        "span",
        "started",
        "streaming",
        "tap",
    )

    def __init__(self, route: Route, request_id: bytes, metrics: RouteMetrics) -> None:
        self.started = time.perf_counter()
        self.route = route
        self.request_id = request_id
        self.metrics = metrics
        self.model = ""
        self.streaming = False
        self.extra_headers: Headers = []
        self.exchange: ClientExchange | None = None
        self.rewrite: Rewrite | None = None
        self.span: Span | None = None
        self.tap: Tap | None = None
        self.admitted = Admitted()
        self.routed = Routed()
        self.answer = Answer()
