"""Headers, request ids and API keys."""

from __future__ import annotations

import hashlib
import json

import pytest
from gateway_harness import CHAT, COMPLETION, eventually, gateway, settings_for
from mock_engine import MockEngine

KEY = "sk-correct-horse"
KEYS = [
    {"name": "alice", "sha256": hashlib.sha256(KEY.encode()).hexdigest()},
    {"name": "bob", "sha256": hashlib.sha256(b"other").hexdigest().upper()},
]


@pytest.mark.parametrize("identity", ["a", "x" * 128, "3f-2_~!{}", "a:b/c"])
async def test_good_request_id_is_kept(identity: str) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        for body in (COMPLETION, {**COMPLETION, "stream": True}):
            answer = await harness.post(body, x_request_id=identity)
            assert answer.headers["x-request-id"] == identity
            assert engine.seen[-1].headers["x-request-id"] == identity
        live = await harness.request("GET", "/health/live", headers={"x-request-id": identity})
        assert live.headers["x-request-id"] == identity
        await eventually(lambda: json.dumps(identity) in harness.log.getvalue())


@pytest.mark.parametrize("identity", ["", "x" * 129, "a b", "a\tb", "\xe9", 'a" b'])
async def test_bad_request_id_is_replaced(identity: str) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        answer = await harness.post(COMPLETION, x_request_id=identity)
        made = answer.headers["x-request-id"]
        assert made.startswith("req-") and len(made) == 28
        assert engine.seen[-1].headers["x-request-id"] == made
        refusal = await harness.post({**COMPLETION, "n": 0}, x_request_id=identity)
        assert refusal.headers["x-request-id"] not in (made, identity)


async def test_end_to_end_headers_pass_and_hop_by_hop_ones_do_not() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        await harness.request(
            "POST",
            "/v1/completions?a=b",
            COMPLETION,
            {
                "connection": "keep-alive, X-Private",
                "x-private": "1",
                "keep-alive": "5",
                "te": "trailers",
                "proxy-authorization": "x",
                "upgrade": "h2c",
                "accept-encoding": "gzip",
                "traceparent": "00-1-2-3",
                "authorization": "Nonsense",
                "user-agent": "t",
            },
        )
        seen = engine.seen[-1]
        assert seen.path == "/v1/completions?a=b"
        assert seen.headers == {
            "traceparent": "00-1-2-3",
            "authorization": "Nonsense",
            "user-agent": "t",
            "content-type": "application/json",
            "content-length": str(len(seen.body)),
            "x-request-id": seen.headers["x-request-id"],
            "host": f"127.0.0.1:{engine.port}",
        }


async def test_server_header_of_the_worker_is_not_passed_on() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        assert "server" not in (await harness.post(COMPLETION)).headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer \xff\xfe",
        f"Bearer: {KEY}",
    ],
)
async def test_bad_authorization_is_401(authorization: str | None, stream: bool) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, api_keys=KEYS)) as harness,
    ):
        for path, body in (
            ("/v1/completions", COMPLETION),
            ("/v1/chat/completions", CHAT),
            ("/v1/embeddings", {"model": "m", "input": "x"}),
        ):
            answer = await harness.post({**body, "stream": stream}, path, **headers)
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.error["type"] == "invalid_request_error"
            assert answer.error["code"] == "invalid_api_key"
            assert KEY.encode() not in answer.body
        models = await harness.request("GET", "/v1/models", headers=headers)
        assert models.status == 401
        assert engine.seen == []
        for path in ("/health/live", "/health/ready", "/metrics", "/docs", "/openapi.json"):
            assert (await harness.request("GET", path, headers=headers)).status == 200
        assert await harness.metric('taut_rejected_total{reason="unauthorized"}') == 4


@pytest.mark.parametrize(
    ("authorization", "caller"),
    [(f"Bearer {KEY}", "alice"), (f"bearer {KEY}", "alice"), ("Bearer other", "bob")],
)
async def test_good_key_is_served_named_and_hidden(authorization: str, caller: str) -> None:
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, api_keys=KEYS)) as harness,
    ):
        assert (await harness.post(COMPLETION, authorization=authorization)).status == 200
        assert "authorization" not in engine.seen[-1].headers
        await eventually(lambda: f'"caller":"{caller}"' in harness.log.getvalue())
        assert KEY not in harness.log.getvalue()


async def test_two_authorization_headers_are_401() -> None:
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, api_keys=KEYS)) as harness,
    ):
        client = await harness.connect()
        await client.send(
            "POST",
            "/v1/completions",
            b"{}",
            {"authorization": f"Bearer {KEY}", "Authorization": f"Bearer {KEY}"},
        )
        assert (await client.head()).status == 401
        client.close()
