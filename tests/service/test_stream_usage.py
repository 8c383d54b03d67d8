"""Every stream is counted; a client sees its usage only if it asks for it."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import json
import time
from typing import Any

import pytest
from admin_harness import administered
from gateway_harness import (
    CHAT,
    COMPLETION,
    Harness,
    eventually,
    gateway,
    settings_for,
    variants_for,
)
from mock_engine import Faults, MockEngine
from test_sse import events_of

from taut_service.config.settings import Settings
from taut_service.http.rewrite import rewrite_for
from taut_service.http.splice import with_edits
from taut_service.http.sse import SseReframer
from taut_service.http.stream_usage import usage_edits

ROUTES = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


async def stream(harness: Harness, path: str, body: Any, **headers: str) -> list[Any]:
    """Return the documents of a stream; its end is checked."""
    data = body if isinstance(body, bytes) else json.dumps({**body, "stream": True}).encode()
    answer = await harness.request("POST", path, data, headers)
    assert answer.status == 200, answer.body
    *events, done, rest = answer.body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    "options",
    [
        None,
        {},
        {"include_usage": False},
        {"include_usage": None},
        {"include_usage": "off"},
        {"continuous_usage_stats": True},
        {"include_usage": 0, "continuous_usage_stats": True},
    ],
)
async def test_stream_that_does_not_ask_is_counted_and_shows_no_usage(
    path: str, body: dict[str, Any], options: dict[str, Any] | None, chunk: int | None
) -> None:
    async with (
        MockEngine(Faults(chunk=chunk)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        documents = await stream(harness, path, {**body, "stream_options": options})
        assert [len(document["choices"]) for document in documents] == [1, 1, 1, 1]
        assert not any("usage" in document for document in documents)
        assert await harness.metric('taut_prompt_tokens_total{model="m"}') == 5
        assert await harness.metric('taut_generated_tokens_total{model="m"}') == 4
        counted = '"prompt_tokens":5,"completion_tokens":4'
        await eventually(lambda: counted in harness.log.getvalue())


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("asked", [True, "true", 1])
@pytest.mark.parametrize("everywhere", [False, True])
async def test_stream_that_asks_gets_its_usage_and_reaches_the_worker_unchanged(
    path: str, body: dict[str, Any], asked: Any, everywhere: bool
) -> None:
    options = {"include_usage": asked, "continuous_usage_stats": everywhere}
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        sent = json.dumps({**body, "stream": True, "stream_options": options}).encode()
        documents = await stream(harness, path, sent)
        assert engine.seen[-1].body == sent
        assert [bool(document.get("usage")) for document in documents] == [everywhere] * 4 + [True]


@pytest.mark.parametrize("body", [{**COMPLETION}, {**COMPLETION, "stream": False}])
async def test_whole_answer_is_asked_for_unchanged(body: dict[str, Any]) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        sent = json.dumps(body).encode()
        assert (await harness.post(sent)).status == 200
        assert engine.seen[-1].body == sent


async def test_served_name_and_usage_are_put_in_together() -> None:
    async with MockEngine() as one, MockEngine(Faults(status=502)) as other:
        model = variants_for(
            {"a": [other], "b": [one]},
            each={
                "a": {"served_name": "longer-than-m", "weight": 1e6},
                "b": {"served_name": "b", "weight": 1e-6},
            },
        )
        settings = Settings.model_validate({"models": [model]})
        async with gateway(settings) as harness:
            body = b'{"x":[1e999], "model" : "m","prompt":"p","stream":true,"stream_options":null}'
            await stream(harness, "/v1/completions", body)
            counted = b'{"x":[1e999], "model" : "%b","prompt":"p","stream":true,'
            counted += b'"stream_options":{"include_usage":true}}'
            assert other.seen[-1].body == counted % b"longer-than-m"
            assert one.seen[-1].body == counted % b"b"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b' {"a":1}', b' {"stream_options":{"include_usage":true},"a":1}'),
        (b'{"stream_options" : null}', b'{"stream_options" : {"include_usage":true}}'),
        (b'{"stream_options":{ } }', b'{"stream_options":{"include_usage":true } }'),
        (
            b'{"n":1e999,"stream_options":{"include_usage":false,"x":{"include_usage":false}}}',
            b'{"n":1e999,"stream_options":{"include_usage":true,"x":{"include_usage":false}}}',
        ),
        (
            b'{"stream_options":{"x":1},"stream_options":{"continuous_usage_stats":true}}',
            b'{"stream_options":{"include_usage":true,"x":1},"stream_options":'
            b'{"include_usage":true,"continuous_usage_stats":false}}',
        ),
        (
            b'{"stream\\u005foptions":{},"m":[{"stream_options":{}}]}',
            b'{"stream\\u005foptions":{"include_usage":true},"m":[{"stream_options":{}}]}',
        ),
        (
            b'{"m":{"stream_options":{}},"t":"\\u0041"}',
            b'{"stream_options":{"include_usage":true},"m":{"stream_options":{}},"t":"\\u0041"}',
        ),
        (b'{"stream_options":"x"}', b'{"stream_options":"x"}'),
        (b'{"stream_options":{"include_usage":"x"}}', b'{"stream_options":{"include_usage":"x"}}'),
    ],
)
def test_wish_is_put_into_the_bytes(body: bytes, expected: bytes) -> None:
    assert with_edits(body, usage_edits(body, json.loads(body))) == expected
    again = json.loads(expected)
    assert usage_edits(expected, again) == ()


def test_only_the_event_of_the_usage_is_taken_out_whatever_the_cuts() -> None:
    hidden = b'{"id":"x","choices":[ ],"usage": {"prompt_tokens":5,"completion_tokens":4}}'
    shown = [
        b'data: {"choices":[{"text":"\\"choices\\":[],\\"usage\\":{"}],"usage":null}',
        b": a comment",
        b'data: {"choices":[{"text":"b"}],"usage":{"prompt_tokens":5,"completion_tokens":4}}',
        b'data: {"choices":[]}',
        b"data: [DONE]",
    ]
    for end in (b"\n", b"\r\n", b"\r"):
        events = [*shown[:4], b"data: " + hidden, shown[4]]
        stream = b"".join(event + end * 2 for event in events)
        expected = b"".join(event + end * 2 for event in shown)
        for i in range(len(stream) + 1):
            rewrite = rewrite_for("m", hide_usage=True, within="")
            reframer = SseReframer(rewrite=rewrite)
            passed = reframer.feed(stream[:i]) + reframer.feed(stream[i:])
            passed += reframer.flush() or b""
            # A line feed after a cut may be one more blank line, which ends nothing.
            assert events_of(passed) == events_of(expected)
            assert reframer.usage == (5, 4)
            assert reframer.events == 4


def key(name: str) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()}


def as_(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def test_usage_by_key_is_a_metric_within_bounds() -> None:
    keys = [key(name) for name in ("a", "b", "c")]
    async with MockEngine() as engine:
        price = {"prompt_per_million": 1.0, "completion_per_million": 2.0}
        model = variants_for({"v": [engine]}, each={"v": {"price": price}})
        sections = {"models": [model], "api_keys": keys, "metrics": {"max_keys": 1}}
        async with gateway(Settings.model_validate(sections)) as harness:
            await check_usage_by_key(harness)


async def check_usage_by_key(harness: Harness) -> None:
    await stream(harness, "/v1/completions", COMPLETION, **as_("b"))
    await harness.post(COMPLETION, **as_("a"))
    await harness.post(COMPLETION, **as_("c"))
    for name, requests in (("b", 1), ("other", 2)):
        labels = f'{{key="{name}",model="m"}}'
        assert await harness.metric(f"taut_key_requests_total{labels}") == requests
        assert await harness.metric(f"taut_key_generated_tokens_total{labels}") == 4 * requests
        assert await harness.metric(f"taut_key_prompt_tokens_total{labels}") == 5 * requests
        cost = await harness.metric(f"taut_key_cost_total{labels}")
        assert cost == pytest.approx((5 * 1.0 + 4 * 2.0) * requests / 1e6)
    text = (await harness.request("GET", "/metrics")).body
    assert b'key="a"' not in text


async def usage_of_requests(admin: Any, requests: int) -> Any:
    """Ask until so many have ended: the gateway learns a moment later that a client has left."""
    deadline = time.monotonic() + 5
    while True:
        told = (await admin.ask("GET", "/admin/usage", headers=as_("boss"))).json
        ended = sum(row["requests"] for row in told["usage"])
        if ended >= requests or time.monotonic() > deadline:
            return told
        await asyncio.sleep(0.02)


async def test_admin_tells_usage_by_key_and_model_as_json_and_csv() -> None:
    admin_key = {**key("boss"), "scopes": ["inference", "admin"]}
    async with MockEngine(Faults(tokens=400, interval_s=0.01)) as engine:
        settings = settings_for(
            engine.url, api_keys=[key("a"), admin_key], admin={"host": "127.0.0.1", "port": 0}
        )
        async with administered(settings) as admin:
            leaver = await admin.harness.connect()
            body = json.dumps({**COMPLETION, "stream": True}).encode()
            await leaver.send("POST", "/v1/completions", body, as_("a"))
            await leaver.head()
            leaver.close()
            engine.faults.interval_s, engine.faults.tokens = 0.0, 4
            await stream(admin.harness, "/v1/completions", COMPLETION, **as_("a"))
            await admin.harness.post(COMPLETION, **as_("boss"))
            told = await usage_of_requests(admin, 3)
            row = {"model": "m", "prompt_tokens": 5, "completion_tokens": 4, "cost": 0.0}
            assert told["usage"] == [
                {**row, "key": "a", "requests": 2, "requests_without_usage": 1},
                {**row, "key": "boss", "requests": 1, "requests_without_usage": 0},
            ]
            answer = await admin.ask("GET", "/admin/usage?format=csv", headers=as_("boss"))
            assert answer.headers["content-type"].startswith("text/csv")
            rows = list(csv.DictReader(io.StringIO(answer.body.decode(), newline="")))
            assert [[entry["key"], entry["completion_tokens"]] for entry in rows] == [
                ["a", "4"],
                ["boss", "4"],
            ]
            assert (
                await admin.ask("GET", "/admin/usage?format=x", headers=as_("boss"))
            ).status == 400
            assert (await admin.ask("GET", "/admin/usage", headers=as_("a"))).status == 403
