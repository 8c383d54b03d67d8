"""What is not a completion: models, passed-on routes, documentation, metrics, the log."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from gateway_harness import COMPLETION, eventually, gateway, settings_for
from mock_engine import Faults, MockEngine
from patience import HANGS_S

OPTIONAL = [
    ("/v1/embeddings", {"model": "m", "input": "x"}),
    ("/tokenize", {"model": "m", "prompt": "x"}),
    ("/detokenize", {"model": "m", "tokens": [1]}),
]


async def test_models_carry_their_provenance() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        listed = (await harness.request("GET", "/v1/models")).json
        assert listed["object"] == "list"
        (card,) = listed["data"]
        assert card["id"] == "m"
        assert card["object"] == "model"
        assert card["max_model_len"] == 64
        assert card["taut"] == {"method": "W8A8", "bits": 8}
        assert abs(card["created"] - time.time()) < 60
        assert (await harness.request("GET", "/v1/models/m")).json == card
        missing = await harness.request("GET", "/v1/models/nope")
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(("path", "body"), OPTIONAL)
async def test_route_the_worker_has_is_passed_on(path: str, body: dict[str, object]) -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        answer = await harness.post(body, path)
        assert answer.status == 200
        assert answer.json["path"] == path
        assert engine.seen[-1].json == body
        assert await harness.metric('taut_prompt_tokens_total{model="m"}') == 3


@pytest.mark.parametrize(("path", "body"), OPTIONAL)
async def test_route_the_worker_lacks_is_a_clear_404(path: str, body: dict[str, object]) -> None:
    async with (
        MockEngine(Faults(absent={path})) as engine,
        gateway(settings_for(engine.url)) as harness,
    ):
        answer = await harness.post(body, path)
        assert (answer.status, answer.error["code"]) == (404, "not_offered")
        assert path in answer.error["message"]


async def test_documentation_names_every_route() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        document = (await harness.request("GET", "/openapi.json")).json
        assert set(document["paths"]) == {
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/embeddings",
            "/tokenize",
            "/detokenize",
            "/v1/models",
            "/v1/models/{name}",
            "/health/live",
            "/health/ready",
            "/health/drain",
            "/metrics",
        }
        assert (await harness.request("GET", "/docs")).status == 200


def series(text: bytes) -> set[bytes]:
    return {line.rsplit(b" ", 1)[0] for line in text.splitlines() if not line.startswith(b"#")}


async def test_junk_in_requests_does_not_grow_the_metrics() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        await harness.post(COMPLETION)
        before = series((await harness.request("GET", "/metrics")).body)
        client = await harness.connect()
        for i in range(300):
            body = json.dumps({"model": f"junk-{i}", "prompt": "x"}).encode()
            await client.send("POST", "/v1/completions", body, {"x-request-id": f"id-{i}"})
            assert (await client.answer()).status == 404
            await client.send("GET", f"/junk-{i}")
            assert (await client.answer()).status == 404
        client.close()
        after = (await harness.request("GET", "/metrics")).body
        assert series(after) == before
        assert b"junk" not in after
        unknown = 'taut_requests_total{model="unknown",route="completions",status="4xx"}'
        assert await harness.metric(unknown) == 300


async def test_requests_are_counted_by_model_route_and_status() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        for _ in range(3):
            await harness.post(COMPLETION)
        await harness.post({**COMPLETION, "n": 0})
        ok = 'taut_requests_total{model="m",route="completions",status="2xx"}'
        assert await harness.metric(ok) == 3
        wrong = 'taut_requests_total{model="m",route="completions",status="4xx"}'
        assert await harness.metric(wrong) == 1
        assert await harness.metric('taut_rejected_total{reason="invalid"}') == 1
        waits = 'taut_queue_wait_seconds_count{model="m"}'
        assert await harness.metric(waits) == 3
        text = (await harness.request("GET", "/metrics")).body.decode()
        families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert families and all(name.startswith("taut_") for name in families)


async def test_scrape_does_not_stop_the_loop() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        longest = 0.0

        async def tick() -> None:
            nonlocal longest
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0)
                longest = max(longest, time.perf_counter() - before)

        ticking = asyncio.create_task(tick())
        for _ in range(5):
            await harness.request("GET", "/metrics")
        ticking.cancel()
        # production-stack stops for 100 ms a scrape; the bound leaves room for a busy test machine.
        assert longest < 0.09


async def test_log_has_one_line_a_request_and_no_prompt() -> None:
    async with MockEngine() as engine, gateway(settings_for(engine.url)) as harness:
        await harness.post({**COMPLETION, "prompt": "the secret prompt"})
        await harness.post({**COMPLETION, "stream": True, "user": "someone"})
        await harness.post({**COMPLETION, "n": 0})
        await eventually(lambda: harness.log.getvalue().count("\n") == 3)
        lines = [json.loads(line) for line in harness.log.getvalue().splitlines()]
        assert [line["status"] for line in lines] == [200, 200, 400]
        first = lines[0]
        assert (first["model"], first["worker"], first["route"]) == ("m", "w0", "completions")
        assert (first["prompt_tokens"], first["completion_tokens"]) == (5, 4)
        assert first["seconds"] > 0
        for word in ("secret", "tok tok", "someone", "hello"):
            assert word not in harness.log.getvalue()


async def test_log_can_be_switched_off() -> None:
    async with (
        MockEngine() as engine,
        gateway(settings_for(engine.url, access_log=False)) as harness,
    ):
        await harness.post(COMPLETION)
        await asyncio.sleep(0.1)
        assert harness.log.getvalue() == ""


def test_package_imports_without_the_heavy_libraries() -> None:
    script = (
        "import sys, taut_service.app, taut_service.http.server, taut_service.__main__\n"
        "heavy = {'torch', 'numpy', 'vllm', 'triton', 'transformers', 'httpx', 'aiohttp',\n"
        "         'taut_kernels', 'taut_deploy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environment)


async def test_process_does_not_hold_pydantic_s_first_version(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    settings = settings_for("http://127.0.0.1:1", admin={"port": 0})
    file.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "importtime", "-m", "taut_service"),
        *("--config", str(file), "--port", "0"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert process.stderr is not None
    imported = []
    try:
        async with asyncio.timeout(2 * HANGS_S):
            while b"hot path" not in (line := await process.stderr.readline()):
                assert line, "the gateway ended at its start"
                imported.append(line.rpartition(b"|")[2].strip())
    finally:
        process.kill()
        await process.communicate()
    assert {b"pydantic.main", b"taut_service.watch.admin"} <= set(imported)
    assert not [name for name in imported if name.startswith(b"pydantic.v1.")]


def test_package_itself_imports_nothing() -> None:
    script = (
        "import sys\nbefore = set(sys.modules)\nimport taut_service\n"
        "assert set(sys.modules) - before == {'taut_service'}\n"
    )
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environment)
