"""Workers from DNS: the whole answer is the set, a bad answer changes nothing."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest
from gateway_harness import eventually

from taut_service.config.settings import Discovery, DnsDiscovery, WorkerSettings
from taut_service.worker.discovery import dns as dns_module
from taut_service.worker.discovery.choose import watch_for
from taut_service.worker.discovery.dns import DnsWatch
from taut_service.worker.discovery.watch import worker_at


class Answers:
    """A resolver that gives the listed answers in turn, the last one for ever."""

    def __init__(self, *answers: set[str] | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def __call__(self, host: str, port: int) -> set[str]:
        assert (host, port) == ("workers.test", 8000)
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def watch(
    *answers: set[str] | Exception, every_s: float = 0.01
) -> tuple[DnsWatch, list[list[str]]]:
    applied: list[list[str]] = []
    settings = DnsDiscovery(host="workers.test", port=8000, every_s=every_s)

    def apply(workers: tuple[WorkerSettings, ...]) -> None:
        applied.append([worker.url for worker in workers])

    return DnsWatch(settings, apply, Answers(*answers)), applied


async def test_every_address_is_a_worker_in_a_fixed_order() -> None:
    one, applied = watch({"10.0.0.2", "10.0.0.1", "fd00::1"})
    await one.look_up()
    assert applied == [["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]]
    assert [worker.name for worker in one.state.workers] == [
        "10.0.0.1:8000",
        "10.0.0.2:8000",
        "[fd00::1]:8000",
    ]


async def test_an_equal_answer_is_not_applied_again() -> None:
    one, applied = watch({"10.0.0.2", "10.0.0.1"}, {"10.0.0.1", "10.0.0.2"})
    await one.look_up()
    await one.look_up()
    assert len(applied) == 1
    assert one.state.changes == 1


@pytest.mark.parametrize(
    "bad",
    [
        set(),
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        OSError(5, "Input/output error"),
        UnicodeError("label too long"),
    ],
)
async def test_a_bad_answer_keeps_the_last_set_and_a_good_one_replaces_it(
    bad: set[str] | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    one, applied = watch({"10.0.0.1"}, bad, bad, {"10.0.0.2"})
    with caplog.at_level(logging.INFO, "taut_service.worker.discovery"):
        for _ in range(4):
            await one.look_up()
    assert applied == [["http://10.0.0.1:8000"], ["http://10.0.0.2:8000"]]
    assert one.state.failures == 2
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1, "the same reason is logged once"
    assert "keeping 1 worker" in warnings[0].getMessage()


async def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns_module, "LOOKUP_TIMEOUT_S", 0.02)

    async def never(_: str, __: int) -> set[str]:
        await asyncio.Event().wait()
        return set()

    settings = DnsDiscovery(host="workers.test", port=8000)
    one = DnsWatch(settings, lambda _: None, never)
    await one.look_up()
    assert one.state.failures == 1
    assert "no answer within" in one.state.detail


async def test_changes_are_followed_until_cancelled() -> None:
    one, applied = watch({"10.0.0.1"}, {"10.0.0.1", "10.0.0.2"}, {"10.0.0.2"})
    task = asyncio.create_task(one.run())
    await eventually(lambda: len(applied) == 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert applied[-1] == ["http://10.0.0.2:8000"]


async def test_the_systems_resolver_is_asked_off_the_loop() -> None:
    applied: list[tuple[WorkerSettings, ...]] = []
    settings = Discovery(dns=DnsDiscovery(host="localhost", port=8123, every_s=60))
    one = watch_for(settings, applied.append)
    task = asyncio.create_task(one.run())
    await eventually(lambda: applied)
    task.cancel()
    assert worker_at("127.0.0.1", 8123) in applied[0]
