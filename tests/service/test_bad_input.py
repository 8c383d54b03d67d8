"""What a client can get wrong: an OpenAI-shaped 4xx, and the worker never hears of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from gateway_harness import CHAT, COMPLETION, Answer, Harness, gateway, settings_for
from mock_engine import MockEngine
from patience import within

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX_BODY = 100_000
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[MockEngine]:
    async with MockEngine() as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(engine: MockEngine) -> AsyncIterator[Harness]:
    settings = settings_for(engine.url, limits={"max_body_bytes": MAX_BODY})
    async with gateway(settings) as harness:
        yield harness


def check(answer: Answer, status: int, param: str | None, code: str | None) -> None:
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.error
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert (error["param"], error["code"]) == (param, code)


FIELD_ROWS: list[tuple[str, Any]] = [
    ("stop", 7),
    ("stop", ["a", 7]),
    ("stop", {"a": 1}),
    ("n", 0),
    ("n", -1),
    ("n", "two"),
    ("n", "0"),
    ("n", "1e0"),
    ("n", 1.5),
    ("n", True),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 65),
    ("max_tokens", 10**30),
    ("max_tokens", "65"),
    ("max_tokens", 65.0),
    ("max_tokens", 8.5),
    ("max_tokens", [8]),
    ("temperature", "hot"),
    ("temperature", -0.1),
    ("temperature", True),
    ("temperature", [1]),
    ("temperature", 10**400),
    ("top_p", 1.5),
    ("top_p", -1),
    ("top_p", 10**400),
    ("top_p", "x"),
]
PROMPT_ROWS: list[Any] = [
    "",
    [],
    [""],
    ["fine", ""],
    [[]],
    [[1, 2], []],
    [1, "a"],
    [1, -2],
    [2**31],
    [1, True],
    [1.5],
    {"text": "x"},
    7,
    False,
    [None],
    [["a"]],
    list(range(65)),
    [[1], list(range(65))],
    "x" * (64 * 16 + 1),
    ["x" * (64 * 16 + 1)],
]
MESSAGE_ROWS: list[Any] = [
    [],
    "hello",
    {"role": "user"},
    ["hello"],
    [None],
    [{"content": "x"}],
    [{"role": 7, "content": "x"}],
    [{"role": "", "content": "x"}],
    [{"role": "user", "content": 7}],
    [{"role": "user", "content": {"text": "x"}}],
    [{"role": "user", "content": "x" * 1025}],
    [{"role": "user", "content": "x" * 600}, {"role": "user", "content": "x" * 600}],
    [{"role": "user", "content": [{"type": "text", "text": "x" * 1025}]}],
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("field", "value"), FIELD_ROWS)
async def test_wrong_sampling_field_is_refused(
    harness: Harness, engine: MockEngine, field: str, value: Any, stream: bool
) -> None:
    before = engine.started
    for path, body in ((COMPLETIONS, COMPLETION), (CHATS, CHAT)):
        answer = await harness.post({**body, "stream": stream, field: value}, path)
        check(answer, 400, field, "invalid_value")
    assert engine.started == before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", PROMPT_ROWS)
async def test_wrong_prompt_is_refused(
    harness: Harness, engine: MockEngine, prompt: Any, stream: bool
) -> None:
    before = engine.started
    answer = await harness.post({**COMPLETION, "stream": stream, "prompt": prompt})
    check(answer, 400, "prompt", "invalid_value")
    assert engine.started == before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("messages", MESSAGE_ROWS)
async def test_wrong_messages_are_refused(
    harness: Harness, engine: MockEngine, messages: Any, stream: bool
) -> None:
    before = engine.started
    answer = await harness.post({**CHAT, "stream": stream, "messages": messages}, CHATS)
    check(answer, 400, "messages", "invalid_value")
    assert engine.started == before


@pytest.mark.parametrize("stream", ["perhaps", 2, -1, [], {}])
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, COMPLETION), (CHATS, CHAT)])
async def test_stream_that_is_not_a_boolean_is_refused(
    harness: Harness, engine: MockEngine, path: str, body: dict[str, Any], stream: Any
) -> None:
    before = engine.started
    check(await harness.post({**body, "stream": stream}, path), 400, "stream", "invalid_value")
    assert engine.started == before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, "prompt"), (CHATS, "messages")])
@pytest.mark.parametrize("null", [False, True])
async def test_missing_input_is_refused(
    harness: Harness, engine: MockEngine, path: str, field: str, null: bool, stream: bool
) -> None:
    before = engine.started
    body: dict[str, Any] = {"model": "m", "stream": stream}
    if null:
        body[field] = None
    check(await harness.post(body, path), 400, field, "missing_required_field")
    assert engine.started == before


async def test_max_completion_tokens_beyond_the_context_is_refused(
    harness: Harness, engine: MockEngine
) -> None:
    before = engine.started
    answer = await harness.post({**CHAT, "max_completion_tokens": 65}, CHATS)
    check(answer, 400, "max_completion_tokens", "invalid_value")
    assert "64" in answer.error["message"]
    assert engine.started == before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model", "status", "code"),
    [
        (7, 400, "invalid_type"),
        (["m"], 400, "invalid_type"),
        ({"m": 1}, 400, "invalid_type"),
        ("", 404, "model_not_found"),
        ("M", 404, "model_not_found"),
        ("m ", 404, "model_not_found"),
        ("\u00e9", 404, "model_not_found"),
        ("y" * 5000, 404, "model_not_found"),
    ],
)
async def test_wrong_model_is_refused(
    harness: Harness, engine: MockEngine, model: Any, status: int, code: str, stream: bool
) -> None:
    before = engine.started
    for path, body in ((COMPLETIONS, COMPLETION), (CHATS, CHAT)):
        answer = await harness.post({**body, "stream": stream, "model": model}, path)
        check(answer, status, "model", code)
        assert len(answer.body) < 500
    assert engine.started == before


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/v1/embeddings", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b'{"model": "m",}',
        b"{'model': 'm'}",
        b'{"model": "m"} x',
        b'{"model": "m", "temperature": NaN}',
        b'{"model": "m", "temperature": -Infinity}',
        b'{"model": "m", "n": ' + b"9" * 5000 + b"}",
        b'{"model": "\xff\xfe"}',
        b'{"model": "\xed\xa0\x80"}',
        b"\xef\xbb\xbf",
        b"\xef\xbb\xbf\xef\xbb\xbf{}",
        '{"model": "m"}'.encode("utf-16"),
        b"[" * 50_000,
        b'{"a":' * 19_000,
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_body_that_is_not_json_is_refused(
    harness: Harness, engine: MockEngine, path: str, body: bytes
) -> None:
    before = len(engine.seen)
    check(await harness.post(body, path), 400, None, "invalid_json")
    assert len(engine.seen) == before


@pytest.mark.parametrize("body", [b"[]", b"[{}]", b'"x"', b"7", b"null", b"true"])
async def test_json_that_is_not_an_object_is_refused(harness: Harness, body: bytes) -> None:
    check(await harness.post(body), 400, None, None)


async def test_infinite_temperature_is_refused(harness: Harness) -> None:
    body = b'{"model":"m","prompt":"x","temperature":1e999}'
    check(await harness.post(body), 400, "temperature", "invalid_value")


async def test_announced_large_body_is_refused_before_it_is_sent(
    harness: Harness, engine: MockEngine
) -> None:
    client = await harness.connect()
    client.writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 10485760\r\n\r\n"
    )
    answer = await client.answer()
    check(answer, 413, None, "request_too_large")
    client.close()
    assert engine.running == 0


async def test_client_that_sends_ten_megabytes_can_read_the_refusal(harness: Harness) -> None:
    body = json.dumps({**COMPLETION, "prompt": "x" * 10_000_000}).encode()
    client = await harness.connect()
    await client.send("POST", COMPLETIONS, body)
    check(await client.answer(), 413, None, "request_too_large")
    # The connection stays usable: what followed was thrown away, not taken for a request.
    await client.send("POST", COMPLETIONS, json.dumps(COMPLETION).encode())
    assert (await client.answer()).status == 200
    client.close()


async def test_chunked_large_body_is_refused(harness: Harness, engine: MockEngine) -> None:
    before = engine.started
    client = await harness.connect()
    client.writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    for _ in range(11):
        client.writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        await client.writer.drain()
    check(await client.answer(), 413, None, "request_too_large")
    client.close()
    assert engine.started == before


async def test_chunked_small_body_is_served(harness: Harness, engine: MockEngine) -> None:
    client = await harness.connect()
    body = json.dumps(COMPLETION).encode()
    client.writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    )
    assert (await client.answer()).status == 200
    assert engine.seen[-1].body == body
    assert engine.seen[-1].headers["content-length"] == str(len(body))
    assert "transfer-encoding" not in engine.seen[-1].headers
    client.close()


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/v1/embeddings"])
async def test_wrong_method_is_refused(harness: Harness, method: str, path: str) -> None:
    answer = await harness.request(method, path)
    check(answer, 405, None, None)
    assert answer.headers["allow"] == "POST"


async def test_wrong_method_on_a_plain_route_is_refused(harness: Harness) -> None:
    check(await harness.request("POST", "/v1/models"), 405, None, None)


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/complete", "/v2/models"])
async def test_unknown_path_is_refused(harness: Harness, path: str) -> None:
    check(await harness.post(COMPLETION, path), 404, None, None)


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 2\r\ncontent-length: 2\r\n",
        b"content-length: 2\r\ncontent-length: 3\r\n",
        b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
        b"content-length: -2\r\n",
        b"content-length: 2x\r\n",
        b"transfer-encoding: chunked\r\nx: a\x00b\r\n",
    ],
)
async def test_ambiguous_framing_is_refused(
    harness: Harness, engine: MockEngine, head: bytes
) -> None:
    before = engine.started
    client = await harness.connect()
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\n" + head + b"\r\n{}")
    assert (await client.head()).status == 400
    client.close()
    assert engine.started == before


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_json_is_accepted_whatever_it_is_called(
    harness: Harness, engine: MockEngine, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"content_type": content_type}
    assert (await harness.post(COMPLETION, **headers)).status == 200
    # vLLM answers 415 to anything else.
    assert engine.seen[-1].headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "extra",
    [
        {"min_p": 0.1, "guided_json": {"a": [1]}, "x": None},
        {"max_tokens": None, "temperature": None, "stop": None, "stream": None, "n": None},
        {"max_tokens": 64, "temperature": 0, "top_p": 1, "stop": ["a", "b"], "n": 2},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": ["a", "b"]},
        {"prompt": list(range(64))},
        {"prompt": "x" * 1024},
        {"prompt": None, "prompt_embeds": "AAAA"},
        {"prompt": "\u00e9\U0001f600\x00"},
    ],
)
async def test_bytes_of_a_good_request_reach_the_worker_unchanged(
    harness: Harness, engine: MockEngine, extra: dict[str, Any]
) -> None:
    body = json.dumps({**COMPLETION, **extra}, indent=3).encode()
    assert (await harness.post(body)).status == 200
    assert engine.seen[-1].body == body


async def test_body_that_does_not_come_is_408() -> None:
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, timeouts={"idle_s": 0.1})) as harness,
    ):
        client = await harness.connect()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 9\r\n\r\n"
        client.writer.write(head + b"{")
        check(await client.answer(), 408, None, "body_timeout")
        client.close()
        assert engine.started == 0


@pytest.mark.parametrize(
    "sent",
    [
        # One byte too many: nothing is left unread that would reset the connection.
        (b"POST /v1/completions HTTP/1.1\r\nx: " + b"y" * 65_537)[:65_537],
        (b"POST /v1/completions HTTP/1.1\r\n" + b"x: y\r\n" * 65_537)[:65_537],
        (b"GET /" + b"y" * 65_537)[:65_537],
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"hello\r\n\r\n",
    ],
    ids=lambda sent: repr(sent[:40]),
)
async def test_what_is_not_http_or_has_an_endless_head_is_refused(
    harness: Harness, sent: bytes
) -> None:
    client = await harness.connect()
    client.writer.write(sent)
    answer = await client.answer()
    assert (answer.status, answer.error["code"]) == (400, "invalid_http")
    client.close()


async def test_connection_without_a_request_is_closed(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taut_service.http.protocol.FRAMING_TIMEOUT_S", 0.05)
    silent, slow = await harness.connect(), await harness.connect()
    slow.writer.write(b"GET /health/live HTTP/1.1\r\nhost: ")
    for client in (silent, slow):
        assert await within(2, client.reader.read()) == b""
        client.close()


async def test_client_that_waits_for_100_continue_is_refused_without_it(harness: Harness) -> None:
    client = await harness.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\nexpect: 100-continue\r\n"
    client.writer.write(head + b"content-length: 10485760\r\n\r\n")
    answer = await client.answer()
    check(answer, 413, None, "request_too_large")
    assert answer.headers["connection"] == "close"
    client.close()


async def test_client_that_waits_for_100_continue_gets_it_when_its_body_is_wanted(
    harness: Harness,
) -> None:
    client = await harness.connect()
    body = json.dumps(COMPLETION).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\nexpect: 100-continue\r\n"
    client.writer.write(head + b"content-length: %d\r\n\r\n" % len(body))
    assert (await client.head()).status == 100
    client.writer.write(body)
    assert (await client.answer()).status == 200
    client.close()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"NaN", "NaN is no number there"),
        (b"-Infinity", "-Infinity is no number there"),
        (b"9" * 5000, "a number has thousands of digits"),
    ],
    ids=["NaN", "Infinity", "digits"],
)
async def test_what_is_no_json_is_named(harness: Harness, value: bytes, said: str) -> None:
    answer = await harness.post(b'{"model":"m","prompt":"x","seed":' + value + b"}")
    check(answer, 400, None, "invalid_json")
    assert answer.error["message"] == f"the request body is not acceptable JSON: {said}"


KINDS = {
    "[]": "an array",
    "null": "null",
    '"a"': "a string",
    "true": "true or false",
    "1.5": "a number",
}


@pytest.mark.parametrize("body", KINDS)
async def test_a_body_that_is_no_object_is_named_in_the_words_of_json(harness: Harness, body: str):
    answer = await harness.request("POST", CHATS, body.encode())
    check(answer, 400, None, None)
    assert answer.error["message"] == f"the request body must be a JSON object, not {KINDS[body]}"
