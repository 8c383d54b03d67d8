"""What a browser needs before it shows an answer to a page of another origin, in raw requests."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from gateway_harness import COMPLETION, gateway, settings_for
from mock_engine import Faults, MockEngine
from pydantic import ValidationError

from taut_service.config.settings.cors import Cors

PAGE = "https://chat.example.org"
KEYS = [{"name": "a", "sha256": hashlib.sha256(b"k").hexdigest()}]
ASK = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_preflight_is_answered_before_keys() -> None:
    async with MockEngine() as engine:
        cors = {"origins": [PAGE], "max_age_s": 77}
        async with gateway(settings_for(engine.url, api_keys=KEYS, cors=cors)) as harness:
            for path in ("/v1/completions", "/v1/models"):
                client = await harness.connect()
                await client.send("OPTIONS", path, headers=ASK)
                answer = await client.head()
                client.close()
                assert answer.status == 204
                assert answer.headers["access-control-allow-origin"] == PAGE
                assert "POST" in answer.headers["access-control-allow-methods"]
                allowed = answer.headers["access-control-allow-headers"]
                assert allowed == "authorization,content-type"
                assert answer.headers["access-control-max-age"] == "77"
            other = await harness.request("OPTIONS", "/v1/completions", headers={"origin": PAGE})
            assert other.status == 405


@pytest.mark.parametrize(
    ("body", "key", "status"),
    [
        (COMPLETION, "k", 200),
        ({**COMPLETION, "stream": True}, "k", 200),
        (COMPLETION, "wrong", 401),
        ({**COMPLETION, "n": 0}, "k", 400),
        ({**COMPLETION, "stream": True, "max_tokens": 2}, "k", 200),
    ],
)
async def test_answers_streams_and_errors_may_be_read(
    body: dict[str, Any], key: str, status: int
) -> None:
    faults = Faults(kill_at_byte=400 if body.get("max_tokens") == 2 else None, tokens=20)
    cors = {"origins": [PAGE], "credentials": True}
    async with (
        MockEngine(faults) as engine,
        gateway(settings_for(engine.url, api_keys=KEYS, cors=cors)) as harness,
    ):
        headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
        answer = await harness.request("POST", "/v1/completions", body, headers)
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-credentials"] == "true"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert answer.headers["vary"] == "origin"
        headers["origin"] = "https://evil.example.org"
        answer = await harness.request("POST", "/v1/completions", body, headers)
        assert "access-control-allow-origin" not in answer.headers


async def test_workers_do_not_decide_who_may_read() -> None:
    raw = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\naccess-control-allow-origin: *\r\n"
        b"content-length: 2\r\n\r\n{}"
    )
    async with MockEngine(Faults(raw=raw)) as engine, gateway(settings_for(engine.url)) as harness:
        answer = await harness.request("POST", "/v1/completions", COMPLETION, {"origin": PAGE})
        assert answer.status == 200
        assert "access-control-allow-origin" not in answer.headers


async def test_every_page_may_be_let_in() -> None:
    cors = {"origins": ["*"]}
    async with MockEngine() as engine, gateway(settings_for(engine.url, cors=cors)) as harness:
        answer = await harness.request("GET", "/v1/models", headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    "cors",
    [
        {"origins": []},
        {"origins": ["chat.example.org"]},
        {"origins": ["https://x/"]},
        {"origins": ["*"], "credentials": True},
        {"origins": ["*"], "headers": ["a b"]},
        {"origins": ["*"], "max_age_s": -1},
    ],
)
def test_rules_that_cannot_work_are_refused(cors: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Cors.model_validate(cors)
