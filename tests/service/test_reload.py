"""A new configuration while requests run: all of it or nothing, and no stream is dropped."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from gateway_harness import (
    COMPLETION,
    Client,
    Harness,
    eventually,
    gateway,
    settings_for,
    variants_for,
)
from mock_engine import Faults, MockEngine

from taut_service.config.settings import SettingsError, WorkerSettings, load_settings
from taut_service.worker.worker import Worker


class Configuration:
    """A file, and a gateway that was started from it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gateway.yaml"
        self.harness: Harness

    def write(self, model: dict[str, Any], **sections: Any) -> None:
        self.path.write_text(yaml.safe_dump({"models": [model], **sections}))

    async def reload(self) -> None:
        await self.harness.app.reloader.reload()

    def worker(self, name: str) -> Worker:
        found = self.harness.app.reloader.current.worker(name)
        assert found is not None
        return found


@asynccontextmanager
async def running(
    folder: Path, model: dict[str, Any], **sections: Any
) -> AsyncIterator[Configuration]:
    configuration = Configuration(folder)
    configuration.write(model, **sections)
    settings = load_settings(configuration.path)
    async with gateway(settings, path=configuration.path) as harness:
        configuration.harness = harness
        yield configuration


async def state_is(harness: Harness, worker: str, state: str) -> bool:
    return (await harness.states()).get(worker) == state


async def test_worker_that_stays_is_the_same_and_not_probed_again(tmp_path: Path) -> None:
    async with (
        MockEngine() as old,
        MockEngine() as new,
        running(tmp_path, variants_for({"v": [old]})) as home,
    ):
        await home.harness.post(COMPLETION)
        before, since = home.worker("v-0"), home.worker("v-0").since
        idle, probes = before.client.idle, old.probes
        home.write(variants_for({"v": [old, new]}))
        await home.reload()
        assert home.worker("v-0") is before
        assert (before.ready, before.since, before.client.idle) == (True, since, idle)
        assert not home.worker("v-1").ready, "a new one has to prove itself"
        await eventually(lambda: home.worker("v-1").ready)
        assert old.probes == probes
        workers = {(await home.harness.post(COMPLETION)).headers["x-taut-worker"] for _ in range(4)}
        assert workers == {"v-0", "v-1"}
        assert await home.harness.metric("taut_configuration_generation") == 2
        assert await home.harness.metric('taut_worker_ready{worker="v-1"}') == 1


async def test_live_stream_keeps_its_worker_to_the_end(tmp_path: Path) -> None:
    async with (
        MockEngine(Faults(tokens=60, interval_s=0.01)) as old,
        MockEngine() as new,
        running(tmp_path, variants_for({"a": [old]})) as home,
    ):
        stream = asyncio.create_task(home.harness.post({**COMPLETION, "stream": True}))
        await eventually(lambda: old.running == 1)
        leaving = home.worker("a-0")
        home.write(variants_for({"b": [new]}))
        await home.reload()
        await home.harness.wait_ready()
        assert (await home.harness.post(COMPLETION)).headers["x-taut-worker"] == "b-0"
        assert not stream.done()
        answer = await stream
        assert answer.headers["x-taut-worker"] == "a-0"
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert answer.body.count(b"data:") == 61
        assert (leaving.outstanding, leaving.client.idle) == (0, 0)
        await eventually(lambda: not old.connections)


async def test_request_that_waits_during_a_reload_goes_to_a_worker_of_the_new_one(
    tmp_path: Path,
) -> None:
    one = {"max_inflight": 1}
    async with (
        MockEngine(Faults(latency_s=0.3)) as old,
        MockEngine() as new,
        running(tmp_path, variants_for({"a": [old]}), admission=one) as home,
    ):
        first = asyncio.create_task(home.harness.post(COMPLETION))
        await eventually(lambda: old.running == 1)
        waiting = asyncio.create_task(home.harness.post(COMPLETION))
        await asyncio.sleep(0.05)
        home.write(variants_for({"b": [new]}), admission=one)
        await home.reload()
        await home.harness.wait_ready()
        assert not first.done()
        assert (await first).headers["x-taut-worker"] == "a-0"
        assert (await waiting).headers["x-taut-worker"] == "b-0"


async def test_drained_worker_stays_drained(tmp_path: Path) -> None:
    async with MockEngine() as engine, running(tmp_path, variants_for({"v": [engine]})) as home:
        home.worker("v-0").drain()
        await home.reload()
        assert (await home.harness.post(COMPLETION)).status == 503


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("models: [", "gateway.yaml:1:10: "),
        ("models: []", "models: "),
        ("speed: 9", "speed: Extra inputs"),
        ("", "expected a mapping"),
        (None, "No such file"),
    ],
)
async def test_bad_file_is_refused_with_its_reasons(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    async with MockEngine() as engine, running(tmp_path, variants_for({"v": [engine]})) as home:
        before = home.harness.app.reloader.current
        if text is None:
            home.path.unlink()
        else:
            home.path.write_text(text)
        with pytest.raises(SettingsError, match=r".") as refused:
            await home.reload()
        lines = str(refused.value).splitlines()
        assert any(reason in line for line in lines)
        assert all(line.startswith(str(home.path)) for line in lines)
        assert home.harness.app.reloader.current is before
        assert (await home.harness.post(COMPLETION)).status == 200
        series = 'taut_reloads_total{result="refused",what="configuration"}'
        assert await home.harness.metric(series) == 1


async def test_address_cannot_change(tmp_path: Path) -> None:
    async with MockEngine() as engine, running(tmp_path, variants_for({"v": [engine]})) as home:
        model = variants_for({"v": [engine]}, aliases=["other"])
        home.write(model, listen={"port": 9}, drain_timeout_s=1)
        with pytest.raises(SettingsError) as refused:
            await home.reload()
        assert str(refused.value).splitlines() == [
            f"{home.path}: listen: cannot change while the gateway runs; restart it",
            f"{home.path}: drain_timeout_s: cannot change while the gateway runs; restart it",
        ]
        assert (await home.harness.post({**COMPLETION, "model": "other"})).status == 404


async def test_everything_else_changes_at_once(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    async with MockEngine() as engine, running(tmp_path, variants_for({"v": [engine]})) as home:
        post = home.harness.post
        home.harness.app.reloader.current.models["m"].set_weights({"v": 7})
        home.write(
            variants_for({"v": [engine], "w": []}, each={"w": {"discover": dns()}}, aliases=["n"]),
            api_keys=[{"name": "k", "sha256": digest}],
            limits={"max_body_bytes": 60},
            timeouts={"first_byte_s": 0.1},
        )
        await home.reload()
        assert (await post(COMPLETION)).status == 401
        key = {"authorization": "Bearer secret"}
        small = {"model": "n", "prompt": "x"}
        assert (await post(small, **key)).status == 200
        assert (await post({**small, "prompt": "x" * 60}, **key)).status == 413
        engine.faults.latency_s = 2
        assert (await post(small, **key)).error["code"] == "worker_timeout"
        models = (await home.harness.request("GET", "/v1/models", headers=key)).json["data"]
        assert models[0]["id"] == "m"
        assert home.harness.app.reloader.current.models["m"].weights == {"v": 1, "w": 1}


def dns() -> dict[str, Any]:
    return {"dns": {"host": "nowhere.invalid", "port": 1, "every_s": 3600}}


async def test_golden_prompt_that_changes_makes_a_worker_prove_itself_again(
    tmp_path: Path,
) -> None:
    async with MockEngine() as engine, running(tmp_path, variants_for({"v": [engine]})) as home:
        before = home.worker("v-0")
        home.write(
            {**variants_for({"v": [engine]}), "golden": {"prompt": "2+2=", "expected_text": "4"}}
        )
        await home.reload()
        assert home.worker("v-0") is not before
        await eventually(lambda: state_is(home.harness, "v-0", "wrong_token"))
        engine.faults.first_token = "4"
        await home.harness.wait_ready()


async def test_discovery_adds_and_removes_workers(tmp_path: Path) -> None:
    def found(*engines: MockEngine) -> list[WorkerSettings]:
        return [
            WorkerSettings(name=f"127.0.0.1:{engine.port}", url=engine.url) for engine in engines
        ]

    model = variants_for({"v": []}, each={"v": {"discover": dns()}})
    async with MockEngine() as a, MockEngine(Faults(tokens=50, interval_s=0.01)) as b:
        configuration = Configuration(tmp_path)
        configuration.write(model)
        settings = load_settings(configuration.path)
        async with gateway(settings, path=configuration.path, ready=False) as harness:
            reloader = harness.app.reloader
            assert (await harness.post(COMPLETION)).error["code"] == "no_ready_worker"
            assert reloader.discovered("m", "v", found(a, b))
            await eventually(lambda: all(w.ready for _, _, w in reloader.current.workers()))
            kept = reloader.current.worker(f"127.0.0.1:{a.port}")
            streams = [
                asyncio.create_task(harness.post({**COMPLETION, "stream": True})) for _ in range(2)
            ]
            await eventually(lambda: b.running == 1)
            assert reloader.discovered("m", "v", found(a))
            assert [w for _, _, w in reloader.current.workers()] == [kept]
            await reloader.reload()
            assert [w for _, _, w in reloader.current.workers()] == [kept]
            answers = await asyncio.gather(*streams)
            assert all(answer.body.endswith(b"[DONE]\n\n") for answer in answers)
            assert not reloader.discovered("m", "other", [])
            assert not reloader.discovered("other", "v", [])
            configuration.write(variants_for({"v": [a]}))
            await reloader.reload()
            assert not reloader.discovered("m", "v", [])


async def test_reloads_do_not_overlap_and_requests_do_not_fail(tmp_path: Path) -> None:
    async with (
        MockEngine() as a,
        MockEngine() as b,
        running(tmp_path, variants_for({"v": [a, b]})) as home,
    ):
        statuses = []

        async def ask() -> None:
            for _ in range(40):
                statuses.append((await home.harness.post(COMPLETION)).status)

        async def change() -> None:
            for i in range(12):
                home.write(variants_for({"v": [a, b]}, aliases=[f"alias-{i}"]))
                await asyncio.gather(home.reload(), home.reload())

        await asyncio.gather(ask(), ask(), change())
        assert set(statuses) == {200}
        assert home.harness.app.reloader.current.number == 25
        assert set(home.harness.app.reloader.current.names) == {"m", "alias-11"}


async def test_sighup_reloads_a_real_process_and_keeps_it_up(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    async with MockEngine() as old, MockEngine() as new:

        def write(engine: MockEngine, **sections: Any) -> None:
            settings = settings_for(engine.url, **sections)
            file.write_text(yaml.safe_dump(settings.model_dump(mode="json")))

        write(old)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "taut_service", "--config", str(file), "--port", "0"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        assert process.stderr is not None
        log = process.stderr

        async def logged(fragment: str) -> str:
            async with asyncio.timeout(20):
                while fragment not in (line := (await log.readline()).decode()):
                    assert line, "the process ended"
                return str(json.loads(line)["message"])

        async def ask() -> int:
            client = Client(*await asyncio.open_connection("127.0.0.1", port))
            await client.send("POST", "/v1/completions", json.dumps(COMPLETION).encode())
            answer = await client.answer()
            client.close()
            return answer.status

        async def answered() -> bool:
            return await ask() == 200

        try:
            port = int((await logged("listening")).rsplit(":", 1)[1])
            await eventually(answered, 20)
            file.write_text("models: 7")
            process.send_signal(signal.SIGHUP)
            assert "gateway.yaml: models: " in await logged("not reloaded")
            assert await ask() == 200
            write(new)
            process.send_signal(signal.SIGHUP)
            await logged("generation 2")
            await eventually(lambda: new.probes > 0)
            await eventually(answered, 20)
            assert new.completed == 1
        finally:
            process.terminate()
            assert await process.wait() == 0


async def test_the_last_worker_of_a_name_is_not_asked_for_its_load(tmp_path: Path) -> None:
    busy = Faults(metrics=b"vllm:num_requests_running 40\n")
    routing = {"load": {"every_s": 0.02}}
    async with MockEngine(busy) as a, MockEngine(busy) as b:
        one, both = variants_for({"v": [a]}), variants_for({"v": [a, b]})
        async with running(tmp_path, both, routing=routing) as home:
            kept = home.worker("v-0")
            await eventually(lambda: kept.reported is not None)
            home.write(one, routing=routing)
            await home.reload()
            assert home.worker("v-0") is kept
            await asyncio.sleep(0.2)  # a question may have been under way
            kept.reported = None
            await asyncio.sleep(0.3)
            assert kept.reported is None
            home.write(both, routing=routing)
            await home.reload()
            await eventually(lambda: kept.reported is not None)
