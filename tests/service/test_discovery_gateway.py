"""A gateway whose workers are discovered: they come, go and stay over reloads under traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from gateway_harness import COMPLETION, eventually, gateway
from kubernetes_api import FakeApi, endpoint, endpoint_slice
from mock_engine import Faults, MockEngine

from taut_service.config.settings import Settings


def document_for(api: FakeApi, **extra: Any) -> dict[str, Any]:
    discover = {
        "kubernetes": {
            "namespace": "ns",
            "service": "vllm",
            "port": "http",
            "api_server": f"https://127.0.0.1:{api.port}",
            "service_account": str(api.folder),
        }
    }
    variant = {"name": "w8a8", "discover": discover}
    return {"models": [{"name": "m", "max_model_len": 64, "variants": [variant]}], **extra}


def slice_of(name: str, engine: MockEngine) -> dict[str, Any]:
    return endpoint_slice(name, endpoint("127.0.0.1"), port=engine.port)


async def test_workers_come_and_go_without_cutting_a_stream(tmp_path: Path) -> None:
    async with (
        MockEngine(Faults(tokens=40, interval_s=0.02)) as one,
        MockEngine() as two,
        FakeApi(tmp_path) as api,
    ):
        settings = Settings.model_validate(document_for(api))
        async with gateway(settings, ready=False) as harness:
            nobody = await harness.post(COMPLETION)
            assert (nobody.status, nobody.error["code"]) == (503, "no_ready_worker")
            await api.put(slice_of("one", one))
            await harness.wait_ready()
            client = await harness.connect()
            assert (await client.begin_stream()).headers["x-taut-worker"] == f"127.0.0.1:{one.port}"
            await api.put(slice_of("two", two))

            async def both_ready() -> bool:
                return set((await harness.states()).values()) == {"ready"} and (
                    len(await harness.states()) == 2
                )

            await eventually(both_ready)
            found = 'taut_discovered_workers{model="m",variant="w8a8"}'
            assert await harness.metric(found) == 2
            await api.delete("one")

            async def one_gone() -> bool:
                return list(await harness.states()) == [f"127.0.0.1:{two.port}"]

            await eventually(one_gone)
            for _ in range(5):
                answer = await harness.post(COMPLETION)
                assert answer.headers["x-taut-worker"] == f"127.0.0.1:{two.port}"
            text = b"".join([chunk async for chunk in client.chunks()])
            assert text.count(b" tok") == 40
            assert text.endswith(b"data: [DONE]\n\n")
            client.close()
            assert await harness.metric(found) == 1


async def test_a_watch_lives_over_reloads_and_ends_with_its_variant(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    async with MockEngine() as one, MockEngine() as two, FakeApi(tmp_path) as api:
        await api.put(slice_of("one", one))
        document = document_for(api)
        file.write_text(yaml.safe_dump(document))
        async with gateway(Settings.model_validate(document), path=file) as harness:
            document["admission"] = {"max_queued": 7}
            file.write_text(yaml.safe_dump(document))
            await harness.app.reloader.reload()
            # What was found stays in force at once, and nothing was asked again.
            assert (await harness.post(COMPLETION)).status == 200
            assert api.lists == 1
            await api.put(slice_of("two", two))

            async def both() -> bool:
                return len(await harness.states()) == 2

            await eventually(both)
            assert api.lists == 1
            worker = {"name": "fixed", "url": two.url}
            document["models"][0]["variants"] = [{"name": "w8a8", "workers": [worker]}]
            file.write_text(yaml.safe_dump(document))
            await harness.app.reloader.reload()
            await eventually(lambda: not api.writers)
            assert list(await harness.states()) == ["fixed"]
            text = (await harness.request("GET", "/metrics")).body
            assert b'taut_discovered_workers{model="m"' not in text


async def test_the_watch_ends_with_the_gateway(tmp_path: Path) -> None:
    async with MockEngine() as one, FakeApi(tmp_path) as api:
        await api.put(slice_of("one", one))
        async with gateway(Settings.model_validate(document_for(api))):
            await eventually(lambda: api.watches)
        await eventually(lambda: not api.writers)


async def test_dns_feeds_a_gateway(tmp_path: Path) -> None:
    async with MockEngine() as engine:
        variant = {"name": "v", "discover": {"dns": {"host": "localhost", "port": engine.port}}}
        model = {"name": "m", "max_model_len": 64, "variants": [variant]}
        async with gateway(Settings.model_validate({"models": [model]})) as harness:
            answer = await harness.post(COMPLETION)
            assert answer.headers["x-taut-worker"] == f"127.0.0.1:{engine.port}"
