"""A real Prometheus scrapes a real gateway: rules are evaluated, panels have something to show."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from gateway_harness import COMPLETION, Harness, eventually, gateway
from mock_engine import Faults
from mock_reader import ReadingEngine
from observability_queries import HOME, OF_WORKERS

from taut_deploy.ports import free_port
from taut_service.config.settings import Settings
from taut_service.rollout.audit import write_line
from taut_service.rollout.file_journal import FileJournal
from taut_service.rollout.state import Rollout

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None,
    reason="NO prometheus HERE: dashboards are NOT queried; apt-get install prometheus",
)


class Prometheus:
    """The server, asked over its HTTP API."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def get(self, path: str, **parameters: str) -> Any:
        answer = await self._client.get(path, params=parameters)
        document = answer.json()
        assert document["status"] == "success", document
        return document["data"]

    async def query(self, expression: str) -> list[Any]:
        found: list[Any] = (await self.get("/api/v1/query", query=expression))["result"]
        return found


@asynccontextmanager
async def prometheus(harness: Harness, folder: Path) -> AsyncIterator[Prometheus]:
    """Run Prometheus with our configuration; only how targets are found is replaced."""
    shutil.copytree(HOME / "prometheus" / "rules", folder / "rules")
    configuration = yaml.safe_load((HOME / "prometheus" / "prometheus.yml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in configuration["scrape_configs"]:
        del job["dns_sd_configs"]
        targets = [f"127.0.0.1:{harness.port}"] if job["job_name"] == "taut-gateway" else []
        job["static_configs"] = [{"targets": targets}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    assert PROMETHEUS is not None
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            server = Prometheus(client)

            async def answers() -> bool:
                try:
                    return bool(await server.query('taut_build_info{job="taut-gateway"}'))
                except (httpx.TransportError, ValueError):
                    # Until it is ready it says so in words, not in JSON.
                    return False

            await eventually(answers, 30)
            yield server
    finally:
        process.kill()
        await process.wait()


async def traffic(harness: Harness) -> None:
    """Use both variants, streamed and whole, for as long as it is let."""
    while True:
        for variant in ("a", "b"):
            headers = {"x-taut-variant": variant}
            body = {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}}
            await harness.request("POST", "/v1/completions", body, headers)
            await harness.request("POST", "/v1/completions", COMPLETION, headers)
        await asyncio.sleep(0.1)


def queries() -> list[tuple[str, str]]:
    (path,) = (HOME / "grafana" / "dashboards").glob("*.json")
    return [
        (panel["title"], target["expr"])
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", ())
    ]


async def test_every_rule_evaluates_and_every_panel_shows_something(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "rollout")
    state = Rollout("m", "b", "a", "id1", "held", 50.0, 0.0, "")
    await journal.append(write_line(None, "held", "me", state, {}))
    await journal.close()
    slow = Faults(interval_s=0.005, tokens=4)
    async with ReadingEngine(faults=slow) as one, ReadingEngine(faults=Faults()) as two:
        price = {"prompt_per_million": 1.0, "completion_per_million": 2.0}
        variants = [
            {"name": name, "price": price, "workers": [{"name": f"w-{name}", "url": url}]}
            for name, url in (("a", one.url), ("b", two.url))
        ]
        model = {"name": "m", "max_model_len": 64, "variants": variants, "baseline": "a"}
        document = {
            "models": [model],
            "admin": {"port": 0},
            "guard": {"sample": 1.0, "max_cpu_share": None, "max_slowdown": 100},
            "rollout": {"directory": str(tmp_path / "rollout")},
        }
        async with gateway(Settings.model_validate(document)) as harness:
            using = asyncio.create_task(traffic(harness))
            async with prometheus(harness, tmp_path) as server:

                async def scraped() -> bool:
                    found = await server.query('count_over_time(up{job="taut-gateway"}[1m]) > 8')
                    return bool(found)

                await eventually(scraped, 40)
                groups = (await server.get("/api/v1/rules"))["groups"]
                rules = [rule for group in groups for rule in group["rules"]]
                bad = [rule for rule in rules if rule["health"] != "ok" or rule.get("lastError")]
                assert len(rules) > 25
                assert bad == []
                empty = []
                for title, expression in queries():
                    words = expression.replace("$__rate_interval", "8s").replace("$model", ".*")
                    found = await server.query(words)
                    # The mock worker exports nothing.
                    if not found and not any(name in words for name in OF_WORKERS):
                        empty.append((title, words))
                assert empty == []
                assert await server.query("ALERTS") == []
            using.cancel()
            await asyncio.gather(using, return_exceptions=True)
