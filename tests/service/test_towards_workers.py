"""Keys, credentials and priorities on the way to a worker; refusals of workers that are full."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import COMPLETION, MODEL, Harness, gateway, settings_for
from mock_engine import Faults, MockEngine
from raw_client import exchange

from taut_service.config.settings import Settings, SettingsError
from taut_service.config.worker_keys import read_worker_keys

KEY = "sk-one"


def keys(*scopes: str) -> list[dict[str, Any]]:
    sha256 = hashlib.sha256(KEY.encode()).hexdigest()
    return [{"name": "one", "sha256": sha256, "scopes": ["inference", *scopes]}]


BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("priority", [-5, "-5", -5.0])
async def test_priority_in_the_body_needs_the_scope(priority: Any) -> None:
    body = {**COMPLETION, "priority": priority}
    async with MockEngine() as engine:
        async with gateway(settings_for(engine.url, api_keys=keys())) as harness:
            answer = await harness.request("POST", "/v1/completions", body, BEARER)
            assert (answer.status, answer.error["param"]) == (403, "priority")
            assert not engine.seen
            allowed = {**body, "priority": 5}
            answer = await harness.request("POST", "/v1/completions", allowed, BEARER)
            assert answer.status == 200
        async with gateway(settings_for(engine.url, api_keys=keys("priority:high"))) as harness:
            assert (await harness.request("POST", "/v1/completions", body, BEARER)).status == 200
        async with gateway(settings_for(engine.url)) as harness:
            assert (await harness.post(body)).status == 200
            assert (await harness.post({**COMPLETION, "priority": "x"})).status == 400


CREDENTIALS = (
    "cookie",
    "proxy-authorization",
    "x-api-key",
    "api-key",
    "x-goog-api-key",
    "anthropic-api-key",
    "x-auth-token",
    "x-forwarded-access-token",
)


async def test_credentials_stay_here() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        sent = dict.fromkeys(CREDENTIALS, "secret")
        answer = await harness.request("POST", "/v1/completions", COMPLETION, {**sent, "x-a": "b"})
        assert answer.status == 200
        assert not set(CREDENTIALS) & set(engine.seen[-1].headers)
        assert engine.seen[-1].headers["x-a"] == "b"


@pytest.mark.parametrize(
    ("authorization", "api_key", "status"),
    [
        (f"Bearer {KEY}", KEY, 200),
        (f"bearer  {KEY}", KEY, 200),
        (f"Bearer {KEY}", "other", 401),
        ("Bearer other", KEY, 401),
        (f"Basic {KEY}", KEY, 401),
    ],
)
async def test_the_same_key_may_come_under_both_names(
    authorization: str, api_key: str, status: int
) -> None:
    headers = {"authorization": authorization, "x-api-key": api_key}
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, api_keys=keys())) as harness,
    ):
        answer = await harness.request("POST", "/v1/completions", COMPLETION, headers)
        assert answer.status == status


def with_key(engine: MockEngine, file: Path) -> dict[str, Any]:
    worker = {"name": "w", "url": engine.url, "api_key_file": str(file)}
    return {"models": [{"name": MODEL, "max_model_len": 64, "workers": [worker]}]}


async def test_worker_gets_its_own_key_and_a_reload_reads_it_again(tmp_path: Path) -> None:
    file, config = tmp_path / "key", tmp_path / "gateway.yaml"
    file.write_text("first\n")
    async with MockEngine() as engine:
        config.write_text(json.dumps(with_key(engine, file)))
        settings = Settings.model_validate(with_key(engine, file))
        async with gateway(settings, path=config) as harness:
            await harness.post(COMPLETION, authorization="Bearer of-the-client")
            assert engine.seen[-1].headers["authorization"] == "Bearer first"
            file.write_text("second")
            await harness.app.reloader.reload()
            await harness.post(COMPLETION)
            assert engine.seen[-1].headers["authorization"] == "Bearer second"
            file.unlink()
            with pytest.raises(SettingsError, match="api_key_file"):
                await harness.app.reloader.reload()
            await harness.post(COMPLETION)
            assert engine.seen[-1].headers["authorization"] == "Bearer second"


@pytest.mark.parametrize("text", ["", "two words", "a\nb", "k" * 9000, "\u00e9"])
def test_file_without_one_key_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(text)
    settings = Settings.model_validate(with_key(MockEngine(port=1), tmp_path / "key"))
    with pytest.raises(SettingsError, match="one key of visible ASCII"):
        read_worker_keys(settings)


def no_retries(harness: Harness) -> None:
    for model in harness.app.reloader.current.models.values():
        while model.budget.spend():
            pass


async def test_worker_that_is_full_is_passed_over_within_the_budget() -> None:
    full = Faults(status=429, error_body=b'{"error":{"message":"its own words"}}')
    async with MockEngine(full) as one, MockEngine() as other:
        retries = {"budget_min_per_s": 0.0001, "budget_ratio": 0.0001, "budget_burst": 3}
        settings = settings_for(one.url, other.url, routing={"retries": retries})
        async with gateway(settings) as harness:
            while not one.seen:
                assert (await harness.post(COMPLETION)).status == 200
            assert await harness.metric('taut_retries_total{cause="429"}') >= 1
            no_retries(harness)
            other.faults.status, other.faults.error_body = 429, full.error_body
            answer = await harness.post(COMPLETION)
            assert (answer.status, answer.body) == (429, full.error_body)


async def test_client_of_http_1_0_gets_a_stream_without_chunks() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        body = json.dumps({**COMPLETION, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body)
        found = await exchange(harness.port, head + body)
        top, _, events = found.partition(b"\r\n\r\n")
        assert b"200 OK" in top
        assert b"transfer-encoding" not in top.lower()
        assert b"connection: close" in top.lower()
        assert events.startswith(b"data: {")
        assert events.endswith(b"data: [DONE]\n\n")
        assert events.count(b" tok") == 4
