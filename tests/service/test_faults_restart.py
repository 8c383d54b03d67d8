"""Restarts under load: workers one after the other, gateways one after the other, and SIGTERM.

The client of the rolling restarts is what a load balancer is: it retries another gateway when a
connection is refused, is closed before the first byte, or is answered 503 by one that drains.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

from live_processes import Gateway, House, eventually, house
from patience import timed
from raw_client import CHAT, Client, body_of, post

from taut_deploy.bench.gateway_load import ClosedLoop, chat_body, request_bytes

DRAIN = {"drain_timeout_s": 10}


class Balancer:
    """Clients in a closed loop over several gateways."""

    def __init__(self, gateways: list[Gateway]) -> None:
        self.ports = [gateway.port for gateway in gateways]
        self.ended: Counter[str] = Counter()
        self.retries = 0
        self.open = True

    async def visit(self, number: int, stream: bool) -> None:
        """One client, until :attr:`open` is false."""
        turn = number
        while self.open:
            turn += 1
            self.ended[await self.ask(turn, stream)] += 1

    async def ask(self, turn: int, stream: bool) -> str:
        """One request: "ok", or what went wrong in the end."""
        failure = ""
        for attempt in range(20):
            port = self.ports[(turn + attempt) % len(self.ports)]
            if attempt:
                self.retries += 1
                await asyncio.sleep(0.02 * (attempt // len(self.ports)))
            try:
                answer = await post(port, body_of(stream=stream))
            except (OSError, asyncio.IncompleteReadError) as problem:
                failure = type(problem).__name__  # refused, or closed before the first byte
                continue
            if answer.status == 503 and b"draining" in answer.body:
                failure = "draining"
                continue
            if answer.status != 200:
                return f"{answer.status} {answer.body[:200]!r}"
            if stream and (not answer.whole or answer.events[-1] != b"data: [DONE]"):
                return "stream broken"
            return "ok"
        return failure


async def test_rolling_restart_of_gateways_fails_no_request(tmp_path: Path) -> None:
    behaviour = {"ttft_s": 0.01, "itl_s": 0.02, "chunks": 10}
    async with house(tmp_path, engines=2, gateways=2, behaviour=behaviour, **DRAIN) as home:
        balancer = Balancer(home.gateways)
        clients = [asyncio.create_task(balancer.visit(i, stream=i % 2 == 0)) for i in range(12)]
        await asyncio.sleep(0.5)
        for gateway in home.gateways:
            gateway.signal(signal.SIGTERM)
            assert await gateway.wait() == 0
            await asyncio.sleep(0.2)
            await gateway.start_and_wait()
            await asyncio.sleep(0.3)
        balancer.open = False
        await asyncio.gather(*clients)
        assert set(balancer.ended) == {"ok"}
        assert balancer.ended["ok"] > 50
        await home.quiet()


async def test_rolling_restart_of_workers_fails_no_whole_request(tmp_path: Path) -> None:
    async with house(tmp_path, engines=3, behaviour={"ttft_s": 0.02}) as home:
        loop = ClosedLoop(home.port, request_bytes(chat_body(200, stream=False), {}, CHAT))
        running = asyncio.create_task(loop.run(12, 9))
        for number, engine in enumerate(home.engines):
            await asyncio.sleep(0.3)
            await engine.kill()
            await asyncio.sleep(0.3)
            await engine.start_and_wait()
            await eventually(lambda n=number: ready(home, n))  # type: ignore[misc]
        loop.tally.open = False
        tally = await running
        assert tally.failures == Counter()
        assert tally.done > 100
        await home.quiet()


def ready(home: House, number: int) -> bool:
    return home.gateway.total("taut_worker_ready", worker=f"w{number}") == 1


async def test_sigterm_lets_live_streams_end_and_refuses_new_requests(tmp_path: Path) -> None:
    async with house(tmp_path, behaviour={"itl_s": 0.05, "chunks": 60}, **DRAIN) as home:
        streams = [
            asyncio.create_task(post(home.port, body_of(stream=True), timeout_s=30))
            for _ in range(50)
        ]
        await eventually(lambda: home.engines[0].state()["open"] == 50)
        home.gateway.signal(signal.SIGTERM)
        await eventually(lambda: not home.gateway.ready())
        refused = await post(home.port, body_of())
        assert refused.status == 503
        assert "retry-after" in {name.lower() for name in refused.headers}
        answers = await asyncio.gather(*streams)
        assert all(answer.whole and answer.error is None for answer in answers)
        assert all(answer.events[-1] == b"data: [DONE]" for answer in answers)
        assert await home.gateway.wait() == 0


async def test_streams_that_outlive_the_drain_end_in_an_error_event(tmp_path: Path) -> None:
    behaviour = {"itl_s": 0.1, "chunks": 1000}
    async with house(tmp_path, behaviour=behaviour, drain_timeout_s=1) as home:
        streams = [
            asyncio.create_task(post(home.port, body_of(stream=True), timeout_s=30))
            for _ in range(20)
        ]
        await eventually(lambda: home.engines[0].state()["open"] == 20)
        home.gateway.signal(signal.SIGTERM)
        answers, seconds = await timed(asyncio.gather(*streams))
        assert all(answer.whole and answer.error is not None for answer in answers)
        assert await home.gateway.wait(6 - seconds) == 0
        await eventually(lambda: home.engines[0].state()["open"] == 0)


async def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    behaviour = {"itl_s": 0.1, "chunks": 1000}
    async with house(tmp_path, behaviour=behaviour, drain_timeout_s=60) as home:
        client = await Client.connect(home.port)
        client.send(body_of(stream=True))
        await client.head()
        home.gateway.signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert home.gateway.running
        home.gateway.signal(signal.SIGTERM)
        await home.gateway.wait(6)
        client.close()


async def test_gateway_starts_before_its_workers_and_serves_once_they_are_there(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as home:
        await home.engines[0].kill()
        home.gateway.signal(signal.SIGTERM)
        await home.gateway.wait()
        home.gateway.start()
        await asyncio.sleep(1)
        assert home.gateway.running
        assert not home.gateway.ready()
        home.engines[0].start()
        await eventually(home.gateway.ready)
        assert (await post(home.port, body_of())).status == 200
