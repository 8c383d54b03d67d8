"""Admission under any interleaving of arrivals, departures, cancellations and time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from taut_service.admit.admission import AdmissionController, Claim
from taut_service.admit.fair_queue import Priority
from taut_service.config.settings import AdmissionLimit
from taut_service.errors import OverloadedError

LIMITS = st.builds(
    AdmissionLimit,
    max_inflight=st.integers(1, 4),
    max_inflight_tokens=st.none() | st.integers(1, 30),
    max_queued=st.integers(0, 4),
    aging_s=st.sampled_from([0.5, 5.0, 1000.0]),
)
CLAIMS = st.builds(
    Claim,
    tokens=st.integers(0, 40),
    key=st.sampled_from(["a", "a", "b"]),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    priority=st.sampled_from([Priority.NORMAL, *Priority]),
    # 0 is over in the next turn of the loop: real time plays no part.
    timeout_s=st.sampled_from([None, None, 0.0]),
)
ARRIVE = st.tuples(st.just("arrive"), CLAIMS)
POINT = st.integers(0, 1000)
STEPS = st.lists(
    ARRIVE
    | ARRIVE
    | st.tuples(st.just("leave"), POINT)
    | st.tuples(st.just("cancel"), POINT)
    | st.tuples(st.just("turn"), st.none())
    | st.tuples(st.just("turn"), st.none())
    | st.tuples(st.just("pass"), st.sampled_from([0.1, 1.0, 10.0]))
    | st.tuples(st.just("limit"), LIMITS),
    min_size=20,
    max_size=100,
)


@dataclass
class World:
    """Requests around one controller; each runs until told to leave."""

    limit: AdmissionLimit
    now: float = 0.0
    arrivals: dict[tuple[str, Priority], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    admitted: list[int] = field(default_factory=list)
    turned_away: set[int] = field(default_factory=set)
    done: dict[int, asyncio.Event] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.controller = AdmissionController(self.limit, clock=lambda: self.now)
        self.lowered = False

    def arrive(self, claim: Claim) -> None:
        number = len(self.tasks)
        self.done[number] = asyncio.Event()
        self.arrivals[claim.key, claim.priority].append(number)
        self.tasks.append(asyncio.create_task(self.visit(number, claim)))

    async def visit(self, number: int, claim: Claim) -> None:
        try:
            async with self.controller.slot(claim):
                self.admitted.append(number)
                self.check()
                await self.done[number].wait()
        except OverloadedError as error:
            assert error.code in ("queue_full", "queue_timeout")
            assert error.code == "queue_full" or claim.timeout_s == 0.0
            assert 1 <= (error.retry_after_s or 0) <= 60
            self.turned_away.add(number)
        finally:
            self.check()

    def check(self) -> None:
        controller = self.controller
        assert controller.inflight >= 0
        assert controller.inflight_tokens >= 0
        assert controller.queued >= 0
        if not self.lowered:
            assert controller.inflight <= self.limit.max_inflight
            assert controller.queued <= self.limit.max_queued
            if self.limit.max_inflight_tokens is not None:
                assert controller.inflight_tokens <= self.limit.max_inflight_tokens

    def running(self) -> list[int]:
        return [number for number in self.admitted if not self.tasks[number].done()]

    async def step(self, kind: str, value: object) -> None:
        if kind == "arrive":
            assert isinstance(value, Claim)
            self.arrive(value)
        elif kind == "leave" and (running := self.running()):
            assert isinstance(value, int)
            self.done[running[value % len(running)]].set()
        elif kind == "cancel" and self.tasks:
            assert isinstance(value, int)
            self.tasks[value % len(self.tasks)].cancel()
        elif kind == "pass":
            assert isinstance(value, float)
            self.now += value
        elif kind == "limit":
            assert isinstance(value, AdmissionLimit)
            self.limit, self.lowered = value, True
            self.controller.apply(value)
        elif kind == "turn":
            await asyncio.sleep(0)
        self.check()

    async def settle(self) -> None:
        for _ in range(len(self.tasks) * 4 + 4):
            for event in self.done.values():
                event.set()
            await asyncio.sleep(0)
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def play(limit: AdmissionLimit, steps: list[tuple[str, object]]) -> World:
    world = World(limit)
    for kind, value in steps:
        await world.step(kind, value)
    await world.settle()
    return world


@settings(max_examples=400, deadline=None, derandomize=True)
@given(limit=LIMITS, steps=STEPS)
def test_counts_return_to_zero_and_stay_in_bounds(
    limit: AdmissionLimit, steps: list[tuple[str, object]]
) -> None:
    world = asyncio.run(play(limit, steps))
    controller = world.controller
    assert (controller.inflight, controller.inflight_tokens, controller.queued) == (0, 0, 0)
    # An assertion within a task would otherwise pass unseen.
    for task in world.tasks:
        if not task.cancelled():
            assert task.exception() is None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(limit=LIMITS, steps=STEPS)
def test_requests_of_a_caller_and_class_are_admitted_in_order(
    limit: AdmissionLimit, steps: list[tuple[str, object]]
) -> None:
    world = asyncio.run(play(limit, steps))
    place = {number: i for i, number in enumerate(world.admitted)}
    for numbers in world.arrivals.values():
        admitted = [place[number] for number in numbers if number in place]
        assert admitted == sorted(admitted)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(limit=LIMITS, claims=st.lists(CLAIMS, min_size=1, max_size=30))
def test_nobody_waits_while_the_head_would_fit(limit: AdmissionLimit, claims: list[Claim]) -> None:
    async def run() -> None:
        world = World(limit)
        for claim in claims:
            world.arrive(claim)
        for _ in range(3):
            await asyncio.sleep(0)
        controller = world.controller
        bound = limit.max_inflight_tokens
        free_places = controller.inflight < limit.max_inflight
        if controller.queued and free_places:
            # Only tokens can hold the head back, and then there are too few for some waiter.
            assert bound is not None
            waiting = [
                claim
                for number, claim in enumerate(claims)
                if number not in world.admitted and number not in world.turned_away
            ]
            assert any(
                controller.inflight_tokens + min(max(1, claim.tokens), bound) > bound
                for claim in waiting
            )
        await world.settle()
        assert len(world.admitted) + len(world.turned_away) == len(claims)

    asyncio.run(run())
