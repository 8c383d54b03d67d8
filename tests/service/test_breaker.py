"""The circuit breaker and the retry budget, on a clock that the test turns."""

from __future__ import annotations

from operator import attrgetter

import pytest

from taut_service.config.settings import Breaker, Retries
from taut_service.route.breaker import CircuitBreaker
from taut_service.route.retry_budget import RetryBudget

LIMITS = Breaker(failures=3, failure_ratio=0.5, window_s=10, open_s=5)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker(LIMITS, clock)
    for _ in range(3):
        breaker.failed(breaker.begin())
    assert breaker.state == "open"
    return breaker


def test_it_opens_after_enough_failures() -> None:
    breaker = CircuitBreaker(LIMITS, Clock())
    for _ in range(2):
        breaker.failed(breaker.begin())
        assert breaker.lets_through()
    breaker.failed(breaker.begin())
    assert not breaker.lets_through()
    assert breaker.opened == 1


def test_failures_further_apart_than_the_window_do_not_add_up() -> None:
    clock = Clock()
    breaker = CircuitBreaker(LIMITS, clock)
    for _ in range(20):
        breaker.failed(False)
        breaker.failed(False)
        clock.now += 10
    assert breaker.closed


@pytest.mark.parametrize(("successes", "closed"), [(3, False), (4, True)])
def test_failures_must_be_a_share_of_all_outcomes(successes: int, closed: bool) -> None:
    breaker = CircuitBreaker(LIMITS, Clock())
    breaker.failed(False)
    for _ in range(successes):
        breaker.succeeded(False)
    breaker.failed(False)
    breaker.failed(False)
    assert breaker.closed is closed


def test_success_long_ago_does_not_excuse_failures_now() -> None:
    breaker = CircuitBreaker(LIMITS, Clock())
    for _ in range(10_000):
        breaker.succeeded(False)
    for _ in range(3):
        breaker.failed(False)
    assert breaker.state == "open"


def test_states_have_names() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 5
    assert breaker.state == "half_open"
    breaker.reset()
    # Asked past mypy, which takes a property for a value that stays.
    assert attrgetter("state")(breaker) == "closed"


def test_half_open_lets_one_probe_through_and_its_success_closes() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 4.9
    assert not breaker.lets_through()
    clock.now += 0.2
    assert breaker.lets_through()
    probe = breaker.begin()
    assert probe
    assert not breaker.lets_through()
    breaker.succeeded(probe)
    assert breaker.closed


def test_failed_probe_opens_again_for_the_whole_time() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 5
    breaker.failed(breaker.begin())
    assert breaker.opened == 2
    clock.now += 4.9
    assert breaker.state == "open"
    clock.now += 0.2
    assert breaker.lets_through()


def test_probe_whose_client_left_makes_room_for_another() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 5
    breaker.abandoned(breaker.begin())
    assert breaker.lets_through()


def test_outcomes_of_requests_from_before_do_not_move_an_open_breaker() -> None:
    clock = Clock()
    breaker = CircuitBreaker(LIMITS, clock)
    early = [breaker.begin() for _ in range(5)]
    for _ in range(3):
        breaker.failed(breaker.begin())
    breaker.succeeded(early[0])
    assert breaker.state == "open"
    clock.now += 5
    probe = breaker.begin()
    breaker.failed(early[1])
    breaker.abandoned(early[2])
    assert not breaker.lets_through(), "the probe is still under way"
    breaker.succeeded(probe)
    assert breaker.closed


def test_request_sent_past_an_open_breaker_is_no_probe() -> None:
    breaker = opened(Clock())
    assert breaker.begin() is False


def test_budget_is_a_share_of_the_requests() -> None:
    clock = Clock()
    limits = Retries(budget_ratio=0.1, budget_min_per_s=0, budget_burst=5)
    budget = RetryBudget(limits, clock)
    assert [budget.spend() for _ in range(6)] == [True] * 5 + [False]
    for _ in range(41):
        budget.earn()
    assert [budget.spend() for _ in range(5)] == [True] * 4 + [False]
    for _ in range(10_000):
        budget.earn()
    assert budget.balance == 5


def test_budget_fills_with_time() -> None:
    clock = Clock()
    limits = Retries(budget_ratio=0, budget_min_per_s=2, budget_burst=3)
    budget = RetryBudget(limits, clock)
    assert [budget.spend() for _ in range(4)] == [True] * 3 + [False]
    clock.now += 1
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    clock.now += 1000
    assert budget.balance == 3
