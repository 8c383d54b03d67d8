"""Keys, rate limits and admission while the configuration is replaced under them."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from gateway_harness import COMPLETION, MODEL, Harness, eventually, gateway
from mock_engine import Faults, MockEngine

from taut_service.config.settings import Settings, SettingsError, load_settings

DIGEST = hashlib.sha256(b"k").hexdigest()


class File:
    """A configuration file with one worker."""

    def __init__(self, folder: Path, engine: MockEngine) -> None:
        self.path = folder / "gateway.yaml"
        worker = {"name": "w", "url": engine.url}
        self._models = [{"name": MODEL, "max_model_len": 64, "workers": [worker]}]

    def write(self, **sections: Any) -> Settings:
        self.path.write_text(yaml.safe_dump({"models": self._models, **sections}))
        return load_settings(self.path)


async def statuses(harness: Harness, count: int) -> list[int]:
    answers = [await harness.post(COMPLETION, authorization="Bearer k") for _ in range(count)]
    return [answer.status for answer in answers]


async def test_new_limit_holds_and_what_was_used_is_not_forgotten(tmp_path: Path) -> None:
    async with MockEngine() as engine:
        file = File(tmp_path, engine)
        key = {"name": "a", "sha256": DIGEST}
        settings = file.write(api_keys=[{**key, "requests_per_minute": 2}])
        async with gateway(settings, path=file.path) as harness:
            assert await statuses(harness, 3) == [200, 200, 429]
            file.write(api_keys=[key])
            await harness.app.reloader.reload()
            assert await statuses(harness, 3) == [200, 200, 200]
            file.write(api_keys=[{**key, "requests_per_minute": 3}])
            await harness.app.reloader.reload()
            assert await statuses(harness, 1) == [429]


async def test_bad_file_of_keys_refuses_the_whole_reload(tmp_path: Path) -> None:
    async with MockEngine() as engine:
        file = File(tmp_path, engine)
        settings = file.write(api_keys=[{"name": "a", "sha256": DIGEST}])
        async with gateway(settings, path=file.path) as harness:
            (tmp_path / "keys").write_text("nonsense\n")
            file.write(api_keys_file=str(tmp_path / "keys"), limits={"max_body_bytes": 1})
            with pytest.raises(SettingsError, match="keys:1: expected 'NAME SHA256'"):
                await harness.app.reloader.reload()
            assert await statuses(harness, 1) == [200]
            (tmp_path / "keys").write_text(f"b {DIGEST}\n")
            file.write(api_keys_file=str(tmp_path / "keys"))
            await harness.app.reloader.reload()
            assert await statuses(harness, 1) == [200]
            assert '"caller":"b"' in await logged(harness)


async def logged(harness: Harness) -> str:
    await eventually(lambda: harness.log.getvalue().count("\n") >= 2)
    return harness.log.getvalue().splitlines()[-1].replace('": "', '":"')


async def test_waiters_survive_and_get_the_new_places(tmp_path: Path) -> None:
    async with MockEngine(Faults(latency_s=1.0)) as engine:
        file = File(tmp_path, engine)
        settings = file.write(admission={"max_inflight": 1})
        async with gateway(settings, path=file.path) as harness:
            running = [asyncio.create_task(harness.post(COMPLETION)) for _ in range(3)]
            await eventually(lambda: harness.app.reloader._admission.queued == 2)
            await eventually(lambda: engine.running == 1)
            file.write(admission={"max_inflight": 3})
            await harness.app.reloader.reload()
            await eventually(lambda: engine.running == 3, 0.9)
            assert [answer.status for answer in await asyncio.gather(*running)] == [200] * 3
            assert harness.app.reloader._admission.inflight == 0


async def test_where_rates_are_counted_cannot_change(tmp_path: Path) -> None:
    async with MockEngine() as engine:
        file = File(tmp_path, engine)
        async with gateway(file.write(), path=file.path) as harness:
            file.write(rate_limits={"store": "redis", "redis": {"url": "redis://127.0.0.1:1"}})
            with pytest.raises(SettingsError, match="rate_limits: cannot change"):
                await harness.app.reloader.reload()
