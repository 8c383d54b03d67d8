"""SIGHUP: the configuration read again by a running gateway, under load, good files and bad."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from live_processes import House, call, eventually, house
from raw_client import CHAT, HOST, body_of, post

from taut_deploy.bench.gateway_load import ClosedLoop, chat_body, request_bytes

WHOLE = request_bytes(chat_body(200, stream=False), {}, CHAT)


def rewrite(home: House, **changes: Any) -> None:
    """Change the file and say so."""
    document = yaml.safe_load(home.gateway.file.read_text())
    document.update(changes)
    home.gateway.file.write_text(yaml.safe_dump(document))
    home.gateway.signal(signal.SIGHUP)


def model_with(home: House, *numbers: int, **changes: Any) -> list[dict[str, Any]]:
    workers = [{"name": f"w{i}", "url": f"http://{HOST}:{home.engines[i].port}"} for i in numbers]
    return [{"name": "m", "max_model_len": 4096, "workers": workers, **changes}]


async def test_workers_are_exchanged_under_load_without_a_failure(tmp_path: Path) -> None:
    async with house(tmp_path, engines=3, behaviour={"ttft_s": 0.01}) as home:
        loop = ClosedLoop(home.port, WHOLE)
        running = asyncio.create_task(loop.run(12, 5))
        for numbers in ((0, 1), (1, 2), (2,), (0, 1, 2)):
            await asyncio.sleep(0.8)
            rewrite(home, models=model_with(home, *numbers))
            await eventually(lambda n=numbers: series_of_workers(home) == set(n))  # type: ignore[misc]
        tally = await running
        assert tally.failures == Counter()
        assert tally.done > 100
        await home.quiet()


def series_of_workers(home: House) -> set[int]:
    names = (n for n in home.gateway.series() if n.startswith("taut_worker_ready{"))
    return {int(name.partition('worker="w')[2][0]) for name in names}


async def test_streams_of_a_worker_that_is_taken_out_go_on_to_their_end(tmp_path: Path) -> None:
    async with house(tmp_path, engines=2, behaviour={"itl_s": 0.05, "chunks": 40}) as home:
        streams = [
            asyncio.create_task(post(home.port, body_of(stream=True), timeout_s=30))
            for _ in range(20)
        ]
        await eventually(lambda: home.engines[0].state()["open"] > 0)
        rewrite(home, models=model_with(home, 1))
        await eventually(lambda: series_of_workers(home) == {1})
        before = home.engines[0].state()["started"]
        answers = await asyncio.gather(*streams)
        assert all(answer.events[-1] == b"data: [DONE]" for answer in answers)
        assert all(answer.error is None for answer in answers)
        home.engines[1].behave(itl_s=0)
        for _ in range(10):
            assert (await post(home.port, body_of())).status == 200
        assert home.engines[0].state()["started"] == before
        await home.quiet()


async def test_bad_file_is_refused_in_one_line_and_the_old_one_stays(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        good = home.gateway.file.read_text()
        for bad in ("models: [", "models: []\n", good + "\nunheard_of: 1\n", "\x00"):
            length = len(home.gateway.text())
            home.gateway.file.write_text(bad)
            home.gateway.signal(signal.SIGHUP)
            await eventually(lambda n=length: len(home.gateway.text()) > n)  # type: ignore[misc]
            assert (await post(home.port, body_of())).status == 200
        home.gateway.file.unlink()
        length = len(home.gateway.text())
        home.gateway.signal(signal.SIGHUP)
        await eventually(lambda: len(home.gateway.text()) > length)
        assert (await post(home.port, body_of())).status == 200
        home.gateway.file.write_text(good.replace("name: m\n", "name: renamed\n"))
        home.gateway.signal(signal.SIGHUP)
        await eventually(lambda: b"renamed" in models(home))
        assert (await post(home.port, body_of())).status == 404


def models(home: House) -> bytes:
    return call(home.port, "GET", "/v1/models")[1]
