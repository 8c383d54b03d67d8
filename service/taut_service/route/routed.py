"""A request and where it is going: its model, its variant, the workers it was given to."""

from __future__ import annotations

from collections.abc import Iterator

from taut_service.call import Call
from taut_service.config.settings import Routing
from taut_service.errors import ForbiddenError, RequestError
from taut_service.route.attempt import Attempt
from taut_service.route.variants import Model, UnknownVariantError, Variant
from taut_service.worker.outgoing import Outgoing
from taut_service.worker.worker import Worker


class RoutedRequest:
    """A request and where it is going.

    Args:
        call: for the log.
        model: that was asked for.
        routing: of the configuration in force when the request came.
        request: what is sent.
        may_pin: whether the caller may choose the variant.

    Raises:
        RequestError: it asks for a variant that does not exist.
        ForbiddenError: it asks for a variant and may not.
    """

    __slots__ = ("_sticky", "call", "model", "pinned", "request", "routing", "tried", "variant")

    def __init__(
        self, call: Call, model: Model, routing: Routing, request: Outgoing, *, may_pin: bool
    ) -> None:
        self.call = call
        self.model = model
        self.routing = routing
        self.request = request
        self.tried: list[Worker] = []
        self._sticky = self._sticky_key()
        pinned = request.pinned_variant
        self.pinned = pinned is not None
        if pinned is None:
            self.variant = model.choose(self._sticky)
        else:
            self.variant = _pinned_variant(model, pinned, may_pin=may_pin)
        call.routed.variant = self.variant.name

    def _sticky_key(self) -> bytes | None:
        sticky = self.model.settings.sticky
        if sticky == "none":
            return None
        by_key = sticky == "key"
        name = self.call.admitted.caller if by_key else self.request.session(self._session_header)
        return name.encode("utf-8", "surrogatepass") if name else None

    @property
    def _session_header(self) -> bytes:
        return self.routing.session_header.encode()

    def has_ready(self) -> bool:
        """Whether any worker it could go to works."""
        return self.variant.has_ready or any(other.has_ready for other in self.others())

    @property
    def hedged_after_s(self) -> float | None:
        """After how long another worker is asked as well; None for no other."""
        return None if self.request.streamed else self.routing.hedge.after_s

    def others(self) -> list[Variant]:
        """Return the variants it may go to when its own has no worker for it, best first."""
        return [] if self.pinned else self.model.others(self.variant, self._sticky)

    def move_to(self, variant: Variant) -> None:
        """Let it belong to another variant; nothing of an answer has been seen."""
        self.variant = variant
        self.call.routed.variant = variant.name

    def brown_out(self) -> None:
        """Let it belong to the model's smaller variant, if it and its caller allow that.

        Not a request that chose its variant, and not into a variant that has no worker.
        """
        rule, key = self.model.settings.brown_out, self.call.admitted.key
        if rule is None or self.pinned or self.variant.name != rule.source:
            return
        smaller = self.model.variants[rule.to]
        # Without keys it is the operator who allows it, for everybody, by configuring it.
        if (key is None or key.brown_out) and smaller.has_ready:
            self.move_to(smaller)

    def keys(self) -> Iterator[int]:
        """Yield its affinity keys."""
        affinity = self.model.settings.affinity
        if affinity.by == "none":
            return iter(())
        return self.request.affinity_keys(affinity, self._session_header, self.call.admitted.caller)

    def wire(self) -> tuple[bytes, bytes]:
        """Return head and body for its variant."""
        return self.request.for_model(self.variant.served_name)

    def begin(self, worker: Worker) -> Attempt:
        """Give it to a worker."""
        self.tried.append(worker)
        self.call.routed.tries = len(self.tried)
        self.call.routed.worker = worker.name
        return Attempt(worker, self.request.tokens)


def _pinned_variant(model: Model, name: str, *, may_pin: bool) -> Variant:
    if not may_pin:
        raise ForbiddenError("this API key may not choose the variant (X-Taut-Variant)")
    try:
        return model.variant(name)
    except UnknownVariantError as error:
        raise RequestError(str(error), code="variant_not_found") from error
