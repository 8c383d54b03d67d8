"""The admin API, on a port of its own: who may use it, what it shows, what it changes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from admin_harness import administered
from gateway_harness import COMPLETION, eventually, settings_for
from mock_engine import Faults, MockEngine
from pydantic import ValidationError

from taut_service.config.settings import Settings

ADMIN_KEY, PLAIN_KEY = "sk-admin", "sk-plain"
KEYS = [
    {"name": "root", "sha256": hashlib.sha256(ADMIN_KEY.encode()).hexdigest(), "scopes": ["admin"]},
    {"name": "user", "sha256": hashlib.sha256(PLAIN_KEY.encode()).hexdigest()},
]


def two_variants(*urls: str, **sections: Any) -> Settings:
    model = {
        "name": "m",
        "aliases": ["other"],
        "max_model_len": 64,
        "variants": [
            {"name": f"v{i}", "weight": 1 - i, "workers": [{"name": f"w{i}", "url": url}]}
            for i, url in enumerate(urls)
        ],
    }
    return Settings.model_validate({"models": [model], "admin": {"port": 0}, **sections})


async def test_state_shows_everything_and_no_prompt() -> None:
    async with (
        MockEngine(Faults(tokens=50, interval_s=0.02)) as engine,
        administered(settings_for(engine.url, admin={"port": 0})) as admin,
    ):
        client = await admin.harness.connect()
        await client.begin_stream()
        state = await admin.state()
        assert (state["generation"], state["draining"], state["live"]) == (1, False, 1)
        model = state["models"]["m"]
        assert (model["inflight"], model["queued"]) == (1, 0)
        assert model["inflight_tokens"] > 0
        variant = model["variants"]["default"]
        assert (variant["weight"], variant["served_name"]) == (1, "m")
        (worker,) = variant["workers"]
        assert worker["name"] == "w0"
        assert (worker["state"], worker["breaker"]) == ("ready", "closed")
        assert (worker["outstanding"], worker["draining"]) == (1, False)
        assert "hello" not in json.dumps(state)
        client.close()

        async def empty() -> bool:
            return bool((await admin.state())["live"] == 0)

        await eventually(empty)


async def test_a_drained_worker_gets_no_request_and_finishes_its_streams() -> None:
    async with (
        MockEngine(Faults(tokens=30, interval_s=0.01)) as one,
        MockEngine() as two,
        administered(settings_for(one.url, two.url, admin={"port": 0})) as admin,
    ):
        harness = admin.harness
        await eventually(lambda: all(w.ready for _, _, w in harness.app.reloader.current.workers()))
        client = await harness.connect()
        body = json.dumps({**COMPLETION, "stream": True}).encode()
        while one.running == 0:
            await client.send("POST", "/v1/completions", body)
            head = await client.head()
            if head.headers["x-taut-worker"] == "w1":
                assert [chunk async for chunk in client.chunks()]
        answer = await admin.ask("POST", "/admin/workers/w0/drain")
        assert (answer.status, answer.json["draining"]) == (200, True)
        for _ in range(10):
            assert (await harness.post(COMPLETION)).headers["x-taut-worker"] == "w1"
        text = b"".join([chunk async for chunk in client.chunks()])
        assert text.count(b" tok") == 30
        client.close()
        assert (await harness.states())["w0"] == "draining"
        assert (await admin.ask("POST", "/admin/workers/w0/undrain")).json["draining"] is False
        one.faults = Faults()
        taken = [(await harness.post(COMPLETION)).headers["x-taut-worker"] for _ in range(20)]
        assert set(taken) == {"w0", "w1"}


@pytest.mark.parametrize("name", ["nope", "a/b", "%2e%2e", "w0/drain"])
async def test_unknown_worker_is_404(name: str) -> None:
    async with (
        MockEngine() as engine,
        administered(settings_for(engine.url, admin={"port": 0})) as admin,
    ):
        answer = await admin.ask("POST", f"/admin/workers/{name}/drain")
        assert (answer.status, answer.error["code"]) == (404, "worker_not_found")


async def test_weights_move_the_traffic() -> None:
    async with (
        MockEngine() as one,
        MockEngine() as two,
        administered(two_variants(one.url, two.url)) as admin,
    ):
        harness = admin.harness
        await eventually(lambda: all(w.ready for _, _, w in harness.app.reloader.current.workers()))
        variants = [(await harness.post(COMPLETION)).headers["x-taut-variant"] for _ in range(5)]
        assert set(variants) == {"v0"}
        answer = await admin.ask("PUT", "/admin/models/m/weights", {"weights": {"v0": 0, "v1": 3}})
        assert (answer.status, answer.json) == (200, {"weights": {"v0": 0.0, "v1": 3.0}})
        variants = [(await harness.post(COMPLETION)).headers["x-taut-variant"] for _ in range(5)]
        assert set(variants) == {"v1"}
        assert await harness.metric('taut_variant_weight{model="m",variant="v1"}') == 3
        by_alias = await admin.ask("PUT", "/admin/models/other/weights", {"weights": {"v0": 1}})
        assert by_alias.json == {"weights": {"v0": 1.0, "v1": 3.0}}


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("m", {"weights": {"v0": 0}}, 400, "invalid_value"),
        ("m", {"weights": {"v0": -1}}, 400, "invalid_value"),
        ("m", {"weights": {"v0": "1"}}, 400, "invalid_value"),
        ("m", {"weights": {}}, 400, "invalid_value"),
        ("m", {"weights": {"v0": 1}, "x": 1}, 400, "invalid_value"),
        ("m", {}, 400, "invalid_value"),
        ("m", b"{", 400, "invalid_value"),
        ("m", b'{"weights": {"v0": 1e999}}', 400, "invalid_value"),
        ("m", b'{"weights": {"v0": NaN}}', 400, "invalid_value"),
        ("m", {"weights": {"nope": 1}}, 404, "variant_not_found"),
        ("nope", {"weights": {"v0": 1}}, 404, "model_not_found"),
    ],
)
async def test_wrong_weights_change_nothing(path: str, body: Any, status: int, code: str) -> None:
    async with (
        MockEngine() as one,
        MockEngine() as two,
        administered(two_variants(one.url, two.url)) as admin,
    ):
        answer = await admin.ask("PUT", f"/admin/models/{path}/weights", body)
        assert (answer.status, answer.error["code"]) == (status, code)
        assert admin.harness.app.reloader.current.models["m"].weights == {"v0": 1, "v1": 0}


async def test_reload_takes_the_file_or_says_why_not(tmp_path: Path) -> None:
    async with MockEngine() as one, MockEngine() as two:
        settings = two_variants(one.url, two.url)
        document = settings.model_dump(mode="json")
        file = tmp_path / "gateway.yaml"
        file.write_text(yaml.safe_dump(document))
        async with administered(settings, file) as admin:
            document["models"][0]["variants"][1]["weight"] = 5
            file.write_text(yaml.safe_dump(document))
            answer = await admin.ask("POST", "/admin/reload")
            assert (answer.status, answer.json) == (200, {"generation": 2})
            weights = admin.harness.app.reloader.current.models["m"].weights
            assert weights == {"v0": 1, "v1": 5}
            good = 'taut_reloads_total{result="ok",what="configuration"}'
            bad = 'taut_reloads_total{result="refused",what="configuration"}'
            assert await admin.harness.metric(good) == 1
            file.write_text("models: []\nnonsense: 1\n")
            answer = await admin.ask("POST", "/admin/reload")
            assert (answer.status, answer.error["code"]) == (409, "configuration_refused")
            assert "nonsense" in answer.error["message"]
            assert (await admin.state())["generation"] == 2
            assert await admin.harness.metric(bad) == 1


async def test_drain_refuses_new_requests_until_reopened() -> None:
    async with (
        MockEngine() as engine,
        administered(settings_for(engine.url, admin={"port": 0})) as admin,
    ):
        harness = admin.harness
        answer = await admin.ask("POST", "/admin/drain")
        assert (answer.status, answer.json) == (200, {"draining": True, "live": 0})
        assert (await harness.request("GET", "/health/ready")).status == 503
        assert (await harness.request("GET", "/health/drain")).status == 200
        refused = await harness.post(COMPLETION)
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert await harness.metric("taut_draining") == 1
        assert (await admin.ask("POST", "/admin/undrain")).status == 200
        assert (await harness.post(COMPLETION)).status == 200
        assert (await harness.request("GET", "/health/ready")).status == 200


async def test_drain_may_go_on_accepting_for_a_while() -> None:
    async with (
        MockEngine() as engine,
        administered(settings_for(engine.url, admin={"port": 0})) as admin,
    ):
        harness = admin.harness
        assert (await admin.ask("POST", "/admin/drain", {"accept_s": 0.4})).status == 200
        assert (await harness.request("GET", "/health/ready")).status == 503
        assert (await harness.post(COMPLETION)).status == 200

        async def refuses() -> bool:
            return (await harness.post(COMPLETION)).status == 503

        await eventually(refuses, 3)
        for wrong in ({"accept_s": -1}, {"accept_s": 1e9}, {"other": 1}, b"[]"):
            assert (await admin.ask("POST", "/admin/drain", wrong)).status == 400


async def test_keys_with_the_scope_admin_only(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        MockEngine() as engine,
        administered(settings_for(engine.url, admin={"port": 0}, api_keys=KEYS)) as admin,
    ):
        for path in ("/admin/state", "/docs", "/openapi.json"):
            nobody = await admin.ask("GET", path)
            if path == "/admin/state":
                assert (nobody.status, nobody.error["code"]) == (401, "invalid_api_key")
            if path == "/docs":
                assert b"http" not in nobody.body.replace(b"HTTP", b"")
        user = {"authorization": f"Bearer {PLAIN_KEY}"}
        root = {"authorization": f"Bearer {ADMIN_KEY}"}
        assert (await admin.ask("GET", "/admin/state", headers=user)).status == 403
        assert (await admin.ask("POST", "/admin/drain", headers=user)).status == 403
        assert (await admin.ask("GET", "/admin/state", headers=root)).status == 200
        with caplog.at_level(logging.INFO, "taut_service.watch.admin"):
            assert (await admin.ask("POST", "/admin/drain", headers=root)).status == 200
        assert [record.getMessage() for record in caplog.records] == [
            "admin root: draining, 0 live"
        ]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.test"}, 403),
        ({"host": "evil.test"}, 403),
        ({"host": "evil.test:8001"}, 403),
        ({"host": ""}, 403),
        ({"host": "[::1"}, 403),
        ({"host": "127.0.0.1@evil.test"}, 403),
        ({"host": "localhost:8001"}, 200),
        ({"host": "[::1]:8001"}, 200),
        ({"host": "127.0.0.1:8001"}, 200),
    ],
)
async def test_web_pages_are_kept_out(headers: dict[str, str], status: int) -> None:
    async with (
        MockEngine() as engine,
        administered(settings_for(engine.url, admin={"port": 0})) as admin,
    ):
        assert (await admin.ask("GET", "/admin/state", headers=headers)).status == status
        if status == 403:
            assert (await admin.ask("POST", "/admin/drain", headers=headers)).status == 403
            assert not admin.harness.app.drain.draining


async def test_the_public_port_knows_no_admin_path() -> None:
    paths = ("/admin/state", "/admin/drain", "/admin/reload", "/admin/workers/w0/drain")
    async with (
        MockEngine() as engine,
        administered(settings_for(engine.url, admin={"port": 0})) as admin,
    ):
        for path in paths:
            for method in ("GET", "POST", "PUT"):
                assert (await admin.harness.request(method, path)).status == 404
        document = (await admin.harness.request("GET", "/openapi.json")).json
        assert not any("admin" in path for path in document["paths"])
        assert (await admin.ask("POST", "/v1/completions", COMPLETION)).status == 404


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "gateway.test", "::"])
def test_an_address_others_can_reach_needs_keys(host: str) -> None:
    admin = {"host": host, "port": 8001}
    with pytest.raises(ValidationError, match="not a loopback address"):
        settings_for("http://127.0.0.1:1", admin=admin)
    assert settings_for("http://127.0.0.1:1", admin=admin, api_keys=KEYS).admin is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_needs_none(host: str) -> None:
    assert settings_for("http://127.0.0.1:1", admin={"host": host, "port": 1}).admin is not None


async def test_schemathesis_finds_no_fault(tmp_path: Path) -> None:
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,"
        "response_schema_conformance"
    )
    async with (
        MockEngine() as engine,
        administered(settings_for(engine.url, admin={"port": 0})) as admin,
    ):
        program = Path(sys.executable).with_name("schemathesis")
        words = ["run", f"http://127.0.0.1:{admin.port}/openapi.json", "--checks", checks]
        words += ["--phases", "examples,coverage,fuzzing", "--mode", "all", "--seed", "4"]
        words += ["--max-examples", "15", "--continue-on-failure", "--no-color"]
        words += ["--generation-database", "none", "--warnings", "off"]
        process = await asyncio.create_subprocess_exec(
            program, *words, cwd=tmp_path, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(120):
            stdout, _ = await process.communicate()
        assert process.returncode == 0, stdout.decode()[-3000:]
        assert "10 selected" in stdout.decode()
        assert (await admin.ask("GET", "/admin/state")).status == 200
