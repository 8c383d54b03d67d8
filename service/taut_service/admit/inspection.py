"""Reads a request's body: checks it, and keeps the few facts that later steps need of it.

Invariant: nothing parsed outlives :func:`inspect`; a request that waits holds its bytes and these
facts. A body that is large, or becomes large when it is parsed, is read in a thread of its own,
one at a time, so that the event loop stays free; after each the thread rests for as long as it
worked, so that a flood of large bodies leaves half of the interpreter to everyone else.
"""

from __future__ import annotations

import asyncio
import codecs
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from taut_service.admit.lax import as_bool, as_int
from taut_service.admit.limits.estimate import Estimate, estimate
from taut_service.admit.request_checks import check_fields, check_scoring, model_of, require
from taut_service.call import Call
from taut_service.config.generation import Generation
from taut_service.errors import GatewayError
from taut_service.http.json_body import parse_body
from taut_service.http.json_bounds import check_shape
from taut_service.http.splice import Places, find_models, name_edits, with_edits
from taut_service.http.stream_usage import usage_edits
from taut_service.route.affinity import prompt_beginning
from taut_service.route.variants import Model

_SESSION_FIELDS = ("prompt_cache_key", "user")
"""Body fields that name a session where the header is missing; OpenAI's, both optional."""


class Facts:
    """What is known of a request's body once it is no longer parsed.

    Args:
        asked: the name of its model.
        model: the model of that name.
        cost: its tokens.
        streamed: whether the client wants a stream.
        session: what it belongs to, None if it does not say.
        beginning: of its prompt, as far as affinity looks at it.
        places: of the model's name in the bytes; empty if nobody looked.
        body: to be sent: as it came, but for what the gateway itself adds.
        hides_usage: whether it adds the wish for a stream's usage.
    """

    __slots__ = (
        "asked", "beginning", "body", "cost", "hides_usage", "model", "places", "session",
        "streamed",
    )  # fmt: skip

    def __init__(
        self,
        asked: str,
        model: Model,
        cost: Estimate,
        streamed: bool,
        session: str | None,
        beginning: str,
        places: Places,
        body: bytes,
        hides_usage: bool,
    ) -> None:
        self.asked = asked
        self.model = model
        self.cost = cost
        self.streamed = streamed
        self.session = session
        self.beginning = beginning
        self.places = places
        self.body = body
        self.hides_usage = hides_usage


class Inspector:
    """Reads bodies, the large ones beside the event loop. Belongs to one event loop."""

    def __init__(self) -> None:
        self._reading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")
        self._rest_until = 0.0

    async def inspect(self, call: Call, body: bytes, generation: Generation) -> Facts:
        """Check a body that is not light; see :func:`inspect`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reading, self._in_turn, call, body, generation)

    def close(self) -> None:
        """End the thread when it has nothing left to do."""
        self._reading.shutdown(wait=False, cancel_futures=True)

    def _in_turn(self, call: Call, body: bytes, generation: Generation) -> Facts:
        started = time.monotonic()
        if started < self._rest_until:
            time.sleep(self._rest_until - started)
            started = time.monotonic()
        try:
            return inspect(call, body, generation, give_way=True)
        except GatewayError as error:
            # Its frames and causes hold the parsed body: the error would while it is sent.
            error.__context__ = None
            raise error.with_traceback(None) from None
        finally:
            ended = time.monotonic()
            self._rest_until = ended + (ended - started)


def inspect(call: Call, body: bytes, generation: Generation, *, give_way: bool = False) -> Facts:
    """Check a body and take down what later steps need.

    Args:
        call: its ``model`` is filled in as soon as it is known.
        body: as it came.
        generation: the configuration in force.
        give_way: let other threads run meanwhile.

    Returns:
        The facts.

    Raises:
        RequestError: the body is not what the route takes.
        NotFoundError: no such model.
        ForbiddenError: the caller may not use it.
    """
    limits = generation.settings.limits
    check_shape(body, limits.max_json_nodes, limits.max_json_depth)
    body = body.removeprefix(codecs.BOM_UTF8)
    document = parse_body(body, give_way=give_way)
    asked = model_of(document, generation.names, generation.only)
    model = generation.names[asked]
    call.model = model.name
    if call.admitted.key is not None:
        call.admitted.key.check_model(model.name)
        call.admitted.key.check_worker_priority(as_int(document.get("priority")))
    route = call.route
    require(document, *route.required)
    for name in route.also_required:
        require(document, name)
    check_fields(document, route.fields, model.limits)
    if route.name == "completions":
        check_scoring(document)
    default = generation.settings.rate_limits.default_max_tokens
    streamed = as_bool(document.get("stream")) is True
    usage = usage_edits(body, document) if streamed and route.stream_usage else ()
    named = name_edits(body, asked) if document.get("model") is None else ()
    body = with_edits(body, sorted((*named, *usage)))
    return Facts(
        asked,
        model,
        estimate(document, route.name, model.limits.max_model_len, default),
        streamed,
        _session(document),
        _beginning(document, model),
        find_models(body) if give_way and _is_renamed(model, asked) else (),
        body,
        bool(usage),
    )


def _beginning(document: dict[str, Any], model: Model) -> str:
    affinity = model.settings.affinity
    if affinity.by != "prefix":
        return ""
    # Of one worker nobody chooses.
    for variant in model.variants.values():
        if len(variant.workers) > 1:
            return prompt_beginning(document, affinity)
    return ""


def _is_renamed(model: Model, asked: str) -> bool:
    return any(variant.served_name != asked for variant in model.variants.values())


def _session(document: dict[str, Any]) -> str | None:
    for field in _SESSION_FIELDS:
        named = document.get(field)
        if isinstance(named, str) and named:
            return named
    return None
