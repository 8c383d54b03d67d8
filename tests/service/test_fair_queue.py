"""The order of the queue: classes, fairness between callers, ageing, who yields when it is full."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from taut_service.admit.fair_queue import FairQueue, Priority, Waiter


@pytest.fixture
async def loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


class Line:
    """A queue whose waiters are told apart by their caller and number."""

    def __init__(self, loop: asyncio.AbstractEventLoop, aging_s: float = 1e9) -> None:
        self.queue = FairQueue(aging_s)
        self.loop = loop
        self.now = 0.0

    def waiter(
        self,
        key: str,
        tokens: int = 1,
        weight: float = 1.0,
        priority: Priority = Priority.NORMAL,
    ) -> Waiter:
        return Waiter(key, weight, priority, tokens, self.now, self.loop.create_future())

    def push(self, key: str, count: int = 1, **kinds: object) -> list[Waiter]:
        waiters = [self.waiter(key, **kinds) for _ in range(count)]  # type: ignore[arg-type]
        for waiter in waiters:
            self.queue.push(waiter)
        return waiters

    def serve(self, count: int) -> list[Waiter]:
        served = []
        for _ in range(count):
            waiter = self.queue.next(self.now)
            self.queue.serve(waiter)
            served.append(waiter)
        return served

    def serve_keys(self, count: int) -> list[str]:
        return [waiter.key for waiter in self.serve(count)]


async def test_one_caller_is_served_in_order(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(loop)
    waiters = [line.push("a", tokens=tokens)[0] for tokens in (900, 1, 50, 7)]
    assert line.serve(4) == waiters
    assert (len(line.queue), line.queue.tokens) == (0, 0)


async def test_flood_of_one_caller_does_not_delay_another(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(loop)
    line.push("flood", 100, tokens=10)
    line.serve(5)
    line.push("quiet", 3, tokens=10)
    assert line.serve_keys(6).count("quiet") == 3


async def test_callers_share_by_tokens_not_by_requests(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(loop)
    line.push("long", 60, tokens=1000)
    line.push("short", 600, tokens=100)
    served = Counter(line.serve_keys(110))
    assert served["long"] == pytest.approx(10, abs=1)
    assert served["short"] == pytest.approx(100, abs=1)


async def test_weight_is_the_share(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(loop)
    line.push("light", 200, tokens=10, weight=1.0)
    line.push("heavy", 200, tokens=10, weight=3.0)
    served = Counter(line.serve_keys(80))
    assert served["heavy"] == pytest.approx(60, abs=1)


async def test_large_head_is_not_starved_by_small_requests(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(loop)
    line.push("large", tokens=500)
    turn = 0
    while line.queue.tokens >= 500 and turn < 200:
        turn += 1
        line.push("small", tokens=10)
        line.serve(1)
    assert turn == pytest.approx(50, abs=1)


async def test_caller_gains_nothing_by_having_been_idle(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(loop)
    line.push("busy", 100, tokens=10)
    line.serve(50)
    line.push("late", 100, tokens=10)
    served = Counter(line.serve_keys(40))
    assert served["late"] == pytest.approx(20, abs=1)


async def test_one_who_gives_up_costs_its_caller_nothing(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(loop)
    line.push("a", 10, tokens=10)
    for waiter in line.push("b", 9, tokens=10):
        line.queue.remove(waiter)
    line.push("b", 10, tokens=10)
    assert Counter(line.serve_keys(10)) == {"a": 5, "b": 5}


async def test_classes_are_strict(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(loop)
    line.push("l", 2, priority=Priority.LOW)
    line.push("n", 2)
    line.push("h", 2, priority=Priority.HIGH, tokens=1000)
    assert line.serve_keys(6) == ["h", "h", "n", "n", "l", "l"]


async def test_low_class_is_not_starved_for_ever(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(loop, aging_s=5.0)
    line.push("low", priority=Priority.LOW)
    waited = None
    for second in range(60):
        line.now = float(second)
        line.push("high", 2, priority=Priority.HIGH)
        if "low" in line.serve_keys(1):
            waited = second
            break
    # Two classes up, one every five seconds, and then its turn among two callers.
    assert waited is not None
    assert 10 <= waited <= 12


async def test_ageing_keeps_a_callers_order(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(loop, aging_s=5.0)
    waiters = line.push("a", 3, priority=Priority.LOW)
    line.now = 4.0
    waiters += line.push("a", 3, priority=Priority.LOW)
    line.now = 6.0
    assert line.serve(6) == waiters


async def test_full_queue_takes_from_who_has_most(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(loop)
    flood = line.push("flood", 10, tokens=10)
    newcomer = line.waiter("quiet", tokens=10)
    assert line.queue.yields_to(newcomer) is flood[-1]
    assert line.queue.yields_to(line.waiter("flood", tokens=10)) is None
    # One whose request alone outweighs the flood has no better claim.
    assert line.queue.yields_to(line.waiter("huge", tokens=101)) is None


async def test_what_was_served_is_no_backlog(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(loop)
    line.push("served", 10, tokens=10)
    line.serve(9)
    waiting = line.push("waiting", 3, tokens=10)
    assert line.queue.yields_to(line.waiter("new", tokens=10)) is waiting[-1]
    assert line.queue.yields_to(line.waiter("served", tokens=10)) is waiting[-1]


async def test_full_queue_takes_from_the_lowest_class_first(
    loop: asyncio.AbstractEventLoop,
) -> None:
    line = Line(loop)
    line.push("n", 8)
    low = line.push("l", 8, priority=Priority.LOW)
    assert line.queue.yields_to(line.waiter("h", priority=Priority.HIGH)) is low[-1]
    assert line.queue.yields_to(line.waiter("n")) is low[-1]


async def test_class_keeps_its_reserve_of_a_full_queue(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(loop)
    high = line.push("h", 14, priority=Priority.HIGH)
    low = line.push("l", 2, priority=Priority.LOW)
    # An eighth of sixteen: the low class keeps its two against the high one, not among itself.
    assert line.queue.yields_to(line.waiter("g", priority=Priority.HIGH)) is high[-1]
    assert line.queue.yields_to(line.waiter("h", priority=Priority.HIGH)) is None
    assert line.queue.yields_to(line.waiter("l", priority=Priority.LOW)) is None
    assert line.queue.yields_to(line.waiter("m", priority=Priority.LOW)) is low[-1]


async def test_low_class_gets_its_reserve_of_a_full_queue(loop: asyncio.AbstractEventLoop) -> None:
    line = Line(loop)
    high = line.push("h", 16, priority=Priority.HIGH)
    assert line.queue.yields_to(line.waiter("l", priority=Priority.LOW)) is high[-1]
