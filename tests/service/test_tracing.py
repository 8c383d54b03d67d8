"""Traces: what the collector gets and what the worker is told, over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from gateway_harness import COMPLETION, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from pydantic import ValidationError

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


class Collector:
    """Takes OTLP over HTTP; ``status`` is what it answers."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.service = ""
        self.status = 200
        self.port = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().lower().split("\r\n")
                assert lines[0].startswith("post /v1/traces ")
                fields = dict(line.split(": ", 1) for line in lines[1:] if line)
                body = await reader.readexactly(int(fields["content-length"]))
                if fields.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        self.spans += scope.spans
                    self.service = attributes(resource.resource)["service.name"]
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % self.status)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def attributes(holder: Any) -> dict[str, Any]:
    return {
        item.key: getattr(item.value, item.value.WhichOneof("value")) for item in holder.attributes
    }


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    one = Collector()
    server = await asyncio.start_server(one.take, "127.0.0.1", 0)
    one.port = server.sockets[0].getsockname()[1]
    try:
        yield one
    finally:
        server.close()


def traced(port: int, **values: Any) -> dict[str, Any]:
    return {"tracing": {"endpoint": f"http://127.0.0.1:{port}/v1/traces", **values}}


async def test_a_request_is_one_span_and_the_workers_parent() -> None:
    async with collector() as one, MockEngine() as engine:
        async with gateway(settings_for(engine.url, **traced(one.port))) as harness:
            headers = {"traceparent": PARENT, "tracestate": "vendor=1", "x-request-id": "id-1"}
            answer = await harness.request("POST", "/v1/completions", COMPLETION, headers)
            assert answer.status == 200
            told = engine.seen[-1].headers["traceparent"]
            assert engine.seen[-1].headers["tracestate"] == "vendor=1"
            await eventually(lambda: harness.log.getvalue())
            line = json.loads(harness.log.getvalue())
        # Ending the gateway sends what is left.
        (span,) = one.spans
        assert one.service == "taut-gateway"
        assert span.trace_id.hex() == PARENT.split("-")[1] == line["trace_id"]
        assert span.parent_span_id.hex() == PARENT.split("-")[2]
        assert told == f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"
        assert span.kind == Span.SPAN_KIND_SERVER
        assert span.name == "POST /v1/completions"
        assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 5e9
        assert attributes(span) == {
            "http.request.method": "POST",
            "http.route": "/v1/completions",
            "http.response.status_code": 200,
            "gen_ai.request.model": "m",
            "gen_ai.usage.input_tokens": 5,
            "gen_ai.usage.output_tokens": 4,
            "taut.request_id": "id-1",
            "taut.variant": "default",
            "taut.worker": "w0",
            "taut.tries": 1,
            "taut.stream": False,
        }
        assert "hello" not in str(span)


async def test_requests_without_a_parent_begin_a_trace_and_failures_are_marked() -> None:
    async with collector() as one, MockEngine(Faults(status=500)) as engine:
        async with gateway(settings_for(engine.url, **traced(one.port))) as harness:
            assert (await harness.post(COMPLETION)).status == 502
            assert (await harness.post({**COMPLETION, "n": 0})).status == 400
        failed, wrong = sorted(one.spans, key=lambda span: span.start_time_unix_nano)
        assert failed.trace_id != wrong.trace_id
        assert failed.parent_span_id == b""
        assert failed.status.code == Status.STATUS_CODE_ERROR
        assert attributes(failed)["error.type"] == "502"
        # The client's mistake is no error of the server.
        assert wrong.status.code == Status.STATUS_CODE_UNSET
        assert attributes(wrong)["http.response.status_code"] == 400
        assert "taut.worker" not in attributes(wrong)


@pytest.mark.parametrize(
    ("ratio", "parent", "kept"), [(0.0, PARENT, True), (1.0, NOT_SAMPLED, False), (0.0, "", False)]
)
async def test_the_client_decides_for_its_own_trace(ratio: float, parent: str, kept: bool) -> None:
    async with collector() as one, MockEngine() as engine:
        async with gateway(settings_for(engine.url, **traced(one.port, ratio=ratio))) as harness:
            headers = {"traceparent": parent} if parent else {}
            assert (await harness.request("POST", "/v1/completions", COMPLETION, headers)).status
            # Sampled or not, the worker learns of the trace.
            flags = int(engine.seen[-1].headers["traceparent"].rsplit("-", 1)[1], 16)
            assert bool(flags & 1) is kept
        assert len(one.spans) == kept


@pytest.mark.parametrize("garbage", ["", "x", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "é" * 40])
async def test_a_wrong_traceparent_begins_a_new_trace(garbage: str) -> None:
    async with collector() as one, MockEngine() as engine:
        async with gateway(settings_for(engine.url, **traced(one.port))) as harness:
            headers = {"traceparent": garbage}
            assert (await harness.request("POST", "/v1/completions", COMPLETION, headers)).status
        (span,) = one.spans
        assert span.parent_span_id == b""
        assert any(span.trace_id)


async def test_without_tracing_the_header_passes_unchanged() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        headers = {"traceparent": PARENT}
        await harness.request("POST", "/v1/completions", COMPLETION, headers)
        assert engine.seen[-1].headers["traceparent"] == PARENT
        await harness.post(COMPLETION)
        assert "traceparent" not in engine.seen[-1].headers


async def test_a_collector_that_fails_costs_no_request() -> None:
    async with collector() as one, MockEngine() as engine:
        one.status = 400
        async with gateway(settings_for(engine.url, **traced(one.port))) as harness:
            for _ in range(20):
                assert (await harness.post(COMPLETION)).status == 200
    async with MockEngine() as engine:
        # Nobody listens on that port.
        settings = settings_for(engine.url, **traced(1, timeout_s=0.2))
        async with asyncio.timeout(10), gateway(settings) as harness:
            assert (await harness.post(COMPLETION)).status == 200


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )


def test_without_tracing_nothing_of_it_is_imported() -> None:
    script = (
        "import sys, taut_service.app, taut_service.http.server, taut_service.__main__\n"
        "found = [name for name in sys.modules if name.startswith(('opentelemetry', 'requests'))]\n"
        "assert not found, found\n"
    )
    result = run(script)
    assert result.returncode == 0, result.stderr


def test_missing_packages_are_one_line(tmp_path: Path) -> None:
    settings = settings_for("http://127.0.0.1:1", **traced(4318)).model_dump(mode="json")
    file = tmp_path / "gateway.yaml"
    file.write_text(yaml.safe_dump(settings))
    script = (
        "import sys\n"
        "sys.modules['opentelemetry.sdk.resources'] = None\n"
        "from taut_service.__main__ import main\n"
        f"sys.exit(main(['--config', {str(file)!r}, '--port', '0']))\n"
    )
    result = run(script)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "install taut[otel]" in result.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "collector:4318"},
        {"endpoint": "grpc://collector:4317"},
        {"endpoint": "http://"},
        {"endpoint": "http://c:4318/v1/traces", "ratio": 1.1},
        {"endpoint": "http://c:4318/v1/traces", "timeout_s": 0},
        {"endpoint": "http://c:4318/v1/traces", "headers": {}},
        {},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        settings_for("http://127.0.0.1:1", tracing=wrong)
