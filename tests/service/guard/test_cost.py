"""What comparisons cost beyond their own steps is learnt, and the budget is kept by it.

Processes are made up: their clients' work varies from request to request, and the machine drifts
between faster and slower. What the guard takes is then known, which no real process tells.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from taut_service.guard.budget import CpuBudget
from taut_service.guard.cost import BOUNDS, CostModel

SHARE, SEEN_S = 0.1, 0.003
REQUEST_S, EVENT_S = 0.0006, 20e-6
DRIFT, DRIFT_S = 0.15, 5.0
LOADS = {"whole answers": (200.0, 0, 0.05), "streams": (50.0, 64, 0.1)}
"""Requests a second, events of each, share that is drawn: more than can be afforded."""


@dataclass
class Process:
    """A gateway whose comparisons cost ``1 + unseen`` times what their steps show."""

    unseen: float
    seed: int
    now: float = 0.0
    cpu: float = 0.0
    clients: float = 0.0
    guard: float = 0.0
    drift: float = 0.0
    chance: random.Random = field(init=False)
    budget: CpuBudget = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.budget = CpuBudget(SHARE, lambda: self.cpu, lambda: self.now)

    def run(self, seconds: float, rate: float, events: int, sample: float) -> float:
        """Serve; return what the guard took of what the clients did."""
        clients, guard, end = self.clients, self.guard, self.now + seconds
        while self.now < end:
            passed = self.chance.expovariate(rate)
            self.now += passed
            pull = passed / DRIFT_S
            self.drift += -self.drift * pull + DRIFT * (2 * pull) ** 0.5 * self.chance.gauss(0, 1)
            slow = max(0.3, 1 + self.drift)
            work = slow * (REQUEST_S * self.chance.uniform(0.5, 1.5) + events * EVENT_S)
            self.clients += work
            self.cpu += work
            self.budget.served(events)
            if self.chance.random() < sample and self.budget.allows():
                seen = slow * SEEN_S * self.chance.uniform(0.7, 1.3)
                self.budget.stepped(seen)
                self.guard += seen * (1 + self.unseen)
                self.cpu += seen * (1 + self.unseen)
        return (self.guard - guard) / (self.clients - clients)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("unseen", [0.2, 0.6, 1.5, 2.5])
@pytest.mark.parametrize("load", LOADS)
def test_the_share_is_kept_whatever_comparisons_cost_unseen(
    load: str, unseen: float, seed: int
) -> None:
    """With a guess of 0.6 in place of what is learnt, 1.5 would take 0.156, 2.5 0.22."""
    process = Process(unseen, seed)
    first = process.run(60.0, *LOADS[load])
    # Cautious at first: it takes more than 1.7 to go beyond, and then not far.
    assert first <= SHARE * max(1.0, (1 + unseen) / 2.7) + 0.005
    later = process.run(300.0, *LOADS[load])
    assert 0.6 * SHARE <= later <= 1.04 * SHARE
    assert 0.95 * (1 + unseen) <= process.budget.factor <= 1 + unseen + 0.7


def test_where_nothing_can_be_told_it_counts_too_much() -> None:
    """Every request is compared, and their cost varies a hundredfold: the prior stands."""
    chance, model = random.Random(5), CostModel()
    for _ in range(400):
        model.learn((1, 0, SEEN_S), chance.choice((0.004, 0.4)))
    assert model.factor >= 2.0


def test_what_was_learnt_follows_a_machine_that_changes() -> None:
    process = Process(0.3, seed=7)
    process.run(300.0, *LOADS["whole answers"])
    calm = process.budget.factor
    process.unseen = 2.0
    process.run(900.0, *LOADS["whole answers"])
    assert calm < 2.0 < 2.4 < process.budget.factor
    assert process.run(300.0, *LOADS["whole answers"]) <= 1.1 * SHARE


@pytest.mark.parametrize("spent_s", [-1.0, float("nan"), float("inf"), 1e9])
def test_a_clock_that_jumps_leaves_a_factor_that_can_be_used(spent_s: float) -> None:
    model = CostModel()
    for _ in range(50):
        model.learn((50, 0, SEEN_S), 0.03)
        model.learn((50, 0, SEEN_S), spent_s)
        model.learn((50, 0, -SEEN_S), 0.03)
    assert BOUNDS[0] <= model.factor <= BOUNDS[1]
