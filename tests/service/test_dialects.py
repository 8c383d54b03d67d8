"""``/v1/responses`` and ``/v1/messages``: passed on, counted, and their own shape of errors."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from gateway_harness import Answer, Harness, gateway, settings_for
from mock_engine import Faults, MockEngine

from taut_service.errors import GatewayError, OverloadedError, RequestError, UpstreamDeadlineError
from taut_service.http.dialect import ANTHROPIC, OPENAI, RESPONSES

RESPONSE = {"model": "m", "input": "hello"}
MESSAGE = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
BOTH = [("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE)]
KEY = "sk-test"
KEYS = [{"name": "someone", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}]


async def streamed(harness: Harness, path: str, body: dict[str, Any]) -> tuple[Answer, bytes]:
    client = await harness.connect()
    await client.send("POST", path, json.dumps({**body, "stream": True}).encode())
    head = await client.head()
    text = b"".join([chunk async for chunk in client.chunks()])
    client.close()
    return head, text


def last_event(text: bytes) -> tuple[str, dict[str, Any]]:
    lines = text.split(b"\n\n")[-2].split(b"\n")
    assert len(lines) == 2
    document: dict[str, Any] = json.loads(lines[1].removeprefix(b"data: "))
    return lines[0].removeprefix(b"event: ").decode(), document


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_whole_answer_is_passed_on_and_counted(path: str, body: dict[str, Any]) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        answer = await harness.post(body, path)
        assert answer.status == 200
        assert answer.headers["x-taut-worker"] == "w0"
        assert engine.seen[-1].path == path
        assert engine.seen[-1].json == body
        assert await harness.metric('taut_prompt_tokens_total{model="m"}') == 5
        assert await harness.metric('taut_generated_tokens_total{model="m"}') == 4


@pytest.mark.parametrize("chunk", [None, 11])
@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_stream_is_passed_on_and_counted(
    path: str, body: dict[str, Any], chunk: int | None
) -> None:
    async with (
        MockEngine(Faults(chunk=chunk)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        head, text = await streamed(harness, path, body)
        assert head.headers["content-type"].startswith("text/event-stream")
        # The whole text comes once more at the end of a response.
        assert text.count(b'": " tok"') == 4
        assert last_event(text)[0] in ("response.completed", "message_stop")
        assert await harness.metric('taut_prompt_tokens_total{model="m"}') == 5
        assert await harness.metric('taut_generated_tokens_total{model="m"}') == 4


async def test_broken_response_stream_ends_in_the_next_numbered_error() -> None:
    async with (
        MockEngine(Faults(kill_at_byte=1400)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        _, text = await streamed(harness, "/v1/responses", RESPONSE)
        name, error = last_event(text)
        assert name == error["type"] == "error"
        assert error["code"] == "worker_lost"
        numbers = [
            json.loads(event.split(b"data: ")[1])["sequence_number"]
            for event in text.split(b"\n\n")[:-1]
        ]
        assert len(numbers) > 2
        assert numbers == list(range(len(numbers)))


async def test_broken_message_stream_ends_in_anthropics_error_event() -> None:
    async with (
        MockEngine(Faults(kill_at_byte=600)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        _, text = await streamed(harness, "/v1/messages", MESSAGE)
        name, document = last_event(text)
        assert name == document["type"] == "error"
        assert document["error"]["type"] == "api_error"
        assert "broke off" in document["error"]["message"]


@pytest.mark.parametrize(
    ("change", "status", "kind", "word"),
    [
        ({"model": "nope"}, 404, "not_found_error", "nope"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 65}, 400, "invalid_request_error", "context is 64"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"stop_sequences": "x"}, 400, "invalid_request_error", "stop_sequences"),
    ],
)
async def test_wrong_message_gets_anthropics_shape(
    change: dict[str, Any], status: int, kind: str, word: str
) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        answer = await harness.post({**MESSAGE, **change}, "/v1/messages", x_request_id="id-1")
        assert answer.status == status
        assert answer.json["type"] == "error"
        assert answer.json["error"]["type"] == kind
        assert answer.json["request_id"] == "id-1"
        assert word in answer.json["error"]["message"]
        assert engine.seen == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [1]}, "input"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 65}, "max_output_tokens"),
    ],
)
async def test_wrong_response_request_is_refused_here(change: dict[str, Any], param: str) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        answer = await harness.post({**RESPONSE, **change}, "/v1/responses")
        assert (answer.status, answer.error["param"]) == (400, param)
        assert engine.seen == []


async def test_workers_openai_refusal_of_a_message_is_rewritten() -> None:
    own = b'{"type":"error","error":{"type":"invalid_request_error","message":"own words"}}'
    openai = b'{"error":{"message":"a field is wrong","type":"Bad Request","code":400}}'
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        for body in (own, openai, b"not json", b'["list"]'):
            engine.faults = Faults(status=400, error_body=body)
            answer = await harness.post(MESSAGE, "/v1/messages")
            assert answer.status == 400
            assert answer.json["type"] == "error"
            if body is own:
                assert answer.body == own
            if body is openai:
                assert answer.json["error"] == {
                    "type": "invalid_request_error",
                    "message": "a field is wrong",
                }


async def test_failing_worker_is_an_anthropic_error_without_its_text() -> None:
    async with (
        MockEngine(Faults(status=500, error_body=b"/path/of/worker.py")) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        answer = await harness.post(MESSAGE, "/v1/messages")
        assert answer.status == 502
        assert answer.json["error"]["type"] == "api_error"
        assert b"/path" not in answer.body


async def test_route_the_worker_lacks_is_a_clear_404() -> None:
    async with (
        MockEngine(Faults(absent={"/v1/messages", "/v1/messages/count_tokens"})) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = await harness.post(MESSAGE, path)
            assert answer.status == 404
            assert "does not offer" in answer.json["error"]["message"]


async def test_anthropics_key_header_is_a_key_and_stays_here() -> None:
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, api_keys=KEYS)) as harness,
    ):
        refused = await harness.post(MESSAGE, "/v1/messages", x_api_key="wrong")
        assert refused.status == 401
        assert refused.json["error"]["type"] == "authentication_error"
        answer = await harness.post(MESSAGE, "/v1/messages", x_api_key=KEY)
        assert answer.status == 200
        assert KEY not in json.dumps(engine.seen[-1].headers)
        assert "x-api-key" not in engine.seen[-1].headers


async def test_tokens_of_a_message_are_counted_by_the_worker() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        answer = await harness.post(MESSAGE, "/v1/messages/count_tokens")
        assert (answer.status, answer.json["path"]) == (200, "/v1/messages/count_tokens")


ERRORS: list[GatewayError] = [
    RequestError("'n' is wrong", param="n", code="invalid_value"),
    OverloadedError("later", retry_after_s=1),
    UpstreamDeadlineError('quotes " and \n lines', code="worker_timeout"),
]


@pytest.mark.parametrize("error", ERRORS)
def test_events_are_one_event_of_parsable_json(error: GatewayError) -> None:
    for dialect in (OPENAI, RESPONSES, ANTHROPIC):
        event = dialect.event(error, b"id", 7)
        assert event.endswith(b"\n\n")
        assert event.count(b"\n\n") == 1
        document = json.loads(event.split(b"data: ")[1])
        detail = document if dialect is RESPONSES else document["error"]
        assert detail["message"].endswith(error.message)


async def test_first_token_of_a_response_is_not_its_preamble() -> None:
    async with (
        MockEngine(Faults(tokens=2, interval_s=0.15)) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        # The mock pauses after each of the two events that come before any token.
        await streamed(harness, "/v1/responses", RESPONSE)
        label = 'model="m",route="responses"'
        first = await harness.metric(f"taut_time_to_first_token_seconds_sum{{{label}}}")
        assert first > 0.25
        variant = '{model="m",variant="default"}'
        rest = await harness.metric(f"taut_variant_time_per_output_token_seconds_sum{variant}")
        assert 0.1 < rest < 0.25
