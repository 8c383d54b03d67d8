"""One request on its way through the gateway, and the routes it can take."""

from __future__ import annotations

import time
from dataclasses import dataclass

from taut_service.metrics import RouteMetrics
from taut_service.request_checks import CHAT_FIELDS, COMPLETION_FIELDS, EMBEDDING_FIELDS, Fields
from taut_service.sse import Usage

CLIENT_CLOSED = 499
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
    """

    path: str
    name: str
    fields: Fields
    required: tuple[str, ...]
    summary: str
    optional: bool = False


ROUTES = (
    Route(
        "/v1/completions",
        "completions",
        COMPLETION_FIELDS,
        ("prompt", "prompt_embeds"),
        "Complete a text prompt; streamed if 'stream' is true",
    ),
    Route(
        "/v1/chat/completions",
        "chat_completions",
        CHAT_FIELDS,
        ("messages",),
        "Answer a conversation; streamed if 'stream' is true",
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
        {},
        ("prompt", "messages"),
        "Count and list the tokens of a text, where the worker does",
        optional=True,
    ),
    Route(
        "/detokenize",
        "detokenize",
        {},
        ("tokens",),
        "Turn token ids into text, where the worker does",
        optional=True,
    ),
)


class Call:
    """What the log and the metrics will say about a request; filled in as it goes.

    Args:
        route: the route taken.
        request_id: checked or made.
        metrics: children to account to; replaced once the model is known.
    """

    __slots__ = (
        "caller",
        "metrics",
        "model",
        "request_id",
        "route",
        "started",
        "status",
        "streaming",
        "tries",
        "usage",
        "worker",
    )

    def __init__(self, route: Route, request_id: bytes, metrics: RouteMetrics) -> None:
        self.started = time.perf_counter()
        self.route = route
        self.request_id = request_id
        self.metrics = metrics
        self.model = ""
        self.worker = ""
        self.caller: str | None = None
        self.status = 0
        self.streaming = False
        self.tries = 0
        self.usage: Usage | None = None
