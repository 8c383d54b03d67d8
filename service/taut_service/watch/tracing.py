"""One OpenTelemetry span a request, sent to a collector as OTLP over HTTP.

With tracing off nothing of OpenTelemetry is imported, and a client's ``traceparent`` passes to
the worker like any other header. With tracing on, the gateway's span takes its place, so that
the worker's spans become children of it. Spans are exported by the SDK's own thread; a collector
that is slow or gone costs spans, never requests. Prompts and answers are never attributes.

Names follow OpenTelemetry's semantic conventions for HTTP servers and for generative AI
(``gen_ai.*``); what they have no name for is called ``taut.*``. Propagation: W3C Trace Context.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from taut_service.call import CLIENT_CLOSED, Call
from taut_service.config.settings import SettingsError, TracingSettings
from taut_service.errors import Headers
from taut_service.watch.families import taut_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
_NANO = 1_000_000_000


class Tracing:
    """Makes and ends spans. One per process.

    Args:
        settings: where spans go and how many are kept.
        exporter: in place of OTLP; given by tests.

    Raises:
        SettingsError: the packages of ``taut[otel]`` are not installed.
    """

    def __init__(self, settings: TracingSettings, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise _lacks(error) from error
        self._provider = TracerProvider(
            resource=Resource.create(
                {"service.name": settings.service_name, "service.version": taut_version()}
            ),
            sampler=ParentBased(TraceIdRatioBased(settings.ratio)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _otlp(settings)))
        self._tracer = self._provider.get_tracer("taut_service")
        self._propagator = TraceContextTextMapPropagator()
        self._in_context = set_span_in_context
        self._kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)

    def begin(self, call: Call, headers: Headers) -> tuple[Span, Headers]:
        """Open the span of a request.

        Args:
            call: the request; its route is known.
            headers: the client's.

        Returns:
            The span, and the headers for the worker with the span in place of its parent.
        """
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in headers
            if name in (TRACEPARENT, TRACESTATE)
        }
        span = self._tracer.start_span(
            f"POST {call.route.path}",
            context=self._propagator.extract(carrier),
            kind=self._kind,
            start_time=time.time_ns() - int((time.perf_counter() - call.started) * _NANO),
        )
        passed_on: dict[str, str] = {}
        self._propagator.inject(passed_on, self._in_context(span))
        kept = [item for item in headers if item[0] not in (TRACEPARENT, TRACESTATE)]
        kept += [(name.encode(), value.encode()) for name, value in passed_on.items()]
        return span, kept

    def end(self, span: Span, call: Call) -> None:
        """Close it with what is known of the request."""
        if span.is_recording():
            status = call.answer.status or CLIENT_CLOSED
            span.set_attributes(_attributes(call, status))
            if status >= 500:
                span.set_status(self._failed)
                span.set_attribute("error.type", str(status))
        span.end()

    def close(self) -> None:
        """Send what is left and stop; blocks for as long as the exporter's own limit."""
        self._provider.shutdown()


def trace_id_of(span: Span) -> str:
    """Return a span's trace id as 32 hexadecimal digits."""
    return f"{span.get_span_context().trace_id:032x}"


def _attributes(call: Call, status: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": "POST",
        "http.route": call.route.path,
        "http.response.status_code": status,
        "gen_ai.request.model": call.model,
        "taut.request_id": call.request_id.decode("latin-1"),
        "taut.variant": call.routed.variant,
        "taut.worker": call.routed.worker,
        "taut.tries": call.routed.tries,
        "taut.stream": call.streaming,
        "taut.caller": call.admitted.caller,
    }
    if call.answer.usage is not None:
        found["gen_ai.usage.input_tokens"] = call.answer.usage.prompt_tokens
        found["gen_ai.usage.output_tokens"] = call.answer.usage.completion_tokens
    return {name: value for name, value in found.items() if value not in ("", None)}


def _otlp(settings: TracingSettings) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise _lacks(error) from error
    return OTLPSpanExporter(endpoint=settings.endpoint, timeout=settings.timeout_s)


def _lacks(error: ImportError) -> SettingsError:
    return SettingsError(f"tracing: needs the package {error.name}; install taut[otel]")
