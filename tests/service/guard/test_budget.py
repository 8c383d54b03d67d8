"""The guard's CPU budget: it is kept whatever clients ask, and used where there is work."""

from __future__ import annotations

import asyncio
import time

import pytest

from taut_service.guard.budget import BURST_S, FLOOR, CpuBudget

TICK_S, COST_S = 0.005, 0.005


class Process:
    """A made-up process: clients' work, and comparisons that are done as soon as allowed."""

    def __init__(self, share: float | None) -> None:
        self.now = self.cpu = 0.0
        self.budget = CpuBudget(share, lambda: self.cpu, lambda: self.now)
        self.asked = self.compared = 0

    def run(self, seconds: float, busy: float) -> None:
        """Draw an answer at every tick; clients' requests take the share ``busy`` of a core."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.cpu += busy * TICK_S
            self.asked += 1
            if self.budget.allows():
                self.compared += 1
                self.cpu += COST_S
                self.budget.spent_s += COST_S


@pytest.mark.parametrize("busy", [0.2, 0.5, 0.9])
def test_comparisons_cost_their_share_of_the_other_work_and_use_it(busy: float) -> None:
    process = Process(0.1)
    process.run(200.0, busy)
    allowed = max(0.1 * busy, FLOOR) * 200.0
    spent = process.compared * COST_S
    assert 0.95 * allowed <= spent <= allowed + BURST_S + COST_S
    # What is told is of the last hundred answers or so.
    assert process.budget.kept == pytest.approx(allowed / COST_S / process.asked, rel=0.5)


def test_a_gateway_that_earns_more_than_an_idle_one_has_no_more_than_its_share() -> None:
    process = Process(0.1)
    process.run(400.0, busy=0.05)
    spent = process.compared * COST_S
    assert spent <= 0.1 * 0.05 * 400.0 + BURST_S + COST_S


def test_an_idle_gateway_has_its_bit_of_a_core() -> None:
    process = Process(0.1)
    process.run(500.0, busy=0.0)
    assert process.compared * COST_S == pytest.approx(0.001 * 500.0, rel=0.05)


def test_work_that_comes_in_bursts_earns_no_more_than_the_same_work_evenly() -> None:
    process = Process(0.1)
    for _ in range(200):
        process.run(0.9, busy=0.0)
        process.run(0.1, busy=1.0)
    allowed = (0.1 * 0.1 + 0.001) * 200.0
    assert process.compared * COST_S <= allowed + BURST_S + COST_S


def test_what_was_not_used_in_quiet_hours_is_not_spent_at_once() -> None:
    process = Process(0.1)
    process.now += 3600.0
    process.cpu += 1800.0
    process.run(1.0, busy=0.2)
    assert process.compared * COST_S <= BURST_S + 0.1 * 0.2 + FLOOR + 2 * COST_S


def test_without_a_bound_everything_is_compared() -> None:
    process = Process(None)
    process.run(10.0, busy=0.1)
    assert (process.compared, process.budget.kept) == (process.asked, 1.0)


def test_a_budget_that_suffices_leaves_nothing_out() -> None:
    process = Process(1.0)
    for _ in range(1000):
        process.now += 0.1
        process.cpu += 0.02
        process.asked += 1
        assert process.budget.allows()
        process.cpu += COST_S
        process.budget.spent_s += COST_S
    assert process.budget.kept == 1.0


async def test_what_waits_to_be_compared_counts_before_it_costs() -> None:
    """A burst of answers does not get in on a credit that the first of them will use up."""
    budget = CpuBudget(0.1, process_s=lambda: 0.0, now=lambda: 0.0)

    async def work() -> None:
        burn(0.001)

    for _ in range(200):
        await budget.charge(work())
    assert budget.cost_s == pytest.approx(0.001 * budget.factor, rel=0.5)
    fresh = CpuBudget(0.1, process_s=lambda: 0.0, now=lambda: 0.0)
    fresh.cost_s = 0.003
    waiting = 0
    for _ in range(50):
        waiting += fresh.allows(waiting)
    assert waiting == 4  # of 3 ms each, with 10 ms saved up: the last may go beyond


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def test_own_steps_are_charged_and_not_what_clients_do_meanwhile() -> None:
    budget = CpuBudget(0.1)

    async def work() -> str:
        burn(0.02)
        await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        burn(0.02)
        return "done"

    async def clients() -> None:
        for _ in range(20):
            burn(0.01)
            await asyncio.sleep(0)

    found, _ = await asyncio.gather(budget.charge(work()), clients())
    assert found == "done"
    assert 0.04 <= budget.spent_s / budget.factor < 0.06


async def test_errors_and_cancellation_pass_through() -> None:
    budget = CpuBudget(0.1)
    ended: list[str] = []

    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cleaned up")

    with pytest.raises(KeyError):
        await budget.charge(fails())
    task = asyncio.create_task(budget.charge(waits()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cleaned up"]
