"""What a rollout does with what is known, and clocks that jump."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from taut_service.config.settings import RolloutSettings
from taut_service.guard.evidence import Evidence
from taut_service.rollout.decide import Facts, decide
from taut_service.rollout.pace import Median, Medians
from taut_service.rollout.shares import weights_of
from taut_service.rollout.state import Rollout
from taut_service.rollout.step_clock import StepClock

SETTINGS = RolloutSettings.model_validate(
    {
        "directory": "/nowhere",
        "min_step_s": 60,
        "min_answers": 100,
        "min_tokens": 1000,
        "min_streams": 5,
    }
)
STATE = Rollout("m", "small", "base", "id1", "running", 1.0, 0.0, "", 50, 500)
BOUNDS = {"kl": 0.1, "disagreement": 0.1}


def evidence(answers: int = 150, step: int = 0, tokens: int = 1500) -> Evidence:
    fields = {f"chat|{name}|{step}": answers for name in BOUNDS}
    return Evidence(BOUNDS, {"answers": answers, "tokens": tokens, **fields})


def failing(errors: int, of: int = 20) -> Evidence:
    """Everything else held; too few errors to prove harm, and more than are allowed."""
    found = evidence()
    found.bounds["error"] = 0.02
    found.add_counts({"text|error|1000": errors, "text|error|0": of - errors})
    return found


def medians(first_s: float, per_s: float, streams: int = 5, spread: float = 1.02) -> Medians:
    return Medians(
        *(Median(at / spread, at, at * spread) for at in (first_s, per_s)), streams=streams
    )


GOOD = Facts(
    evidence=evidence(),
    alpha=0.05,
    paused="",
    watched_s=60,
    jumped_s=0,
    candidate=medians(0.14, 0.014),
    baseline=medians(0.10, 0.010),
)


def test_with_everything_in_it_climbs_to_the_next_step_and_at_last_is_complete() -> None:
    climbed = []
    state = STATE
    while (decision := decide(state, GOOD, SETTINGS)).action == "promote":
        climbed.append(decision.percent)
        state = replace(state, percent=decision.percent)
    assert (climbed, decision.action, decision.percent) == ([10, 50, 100], "complete", 100)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"paused": "no worker of 'base' is ready"}, "paused: no worker of 'base' is ready"),
        ({"watched_s": 59.9}, "60 of 60 s at this step"),
        ({"watched_s": 2, "jumped_s": 3600}, "2 of 60 s at this step; a clock jumped by +3600 s"),
        ({"evidence": evidence(149)}, "99 of 100 compared answers"),
        ({"evidence": evidence(150, tokens=1499)}, "999 of 1000 compared tokens"),
        ({"evidence": evidence(150, step=90)}, "kl is not proven to stay below 0.1 yet"),
        ({"evidence": failing(2)}, "error is 0.1 over 20, at most 0.02 is allowed"),
        (
            {"candidate": medians(0.151, 0.01)},
            "first token: median 0.151 s, at most 1.5 times 0.1 s are allowed",
        ),
        (
            {"candidate": medians(0.10, 0.0151)},
            "tokens: median 0.0151 s, at most 1.5 times 0.01 s are allowed",
        ),
        (
            {"candidate": medians(0.10, 0.01, spread=1.6)},
            "first token: median 0.1 s is not proven to stay below 1.5 times 0.1 s yet",
        ),
        (
            {"baseline": medians(0.10, 0.01, spread=1.6)},
            "first token: median 0.14 s is not proven to stay below 1.5 times 0.1 s yet",
        ),
    ],
)
def test_each_lack_is_named_and_nothing_is_promoted(changes: dict[str, Any], why: str) -> None:
    decision = decide(STATE, replace(GOOD, **changes), SETTINGS)
    assert decision.action == "wait"
    assert decision.why.startswith(why)


def test_few_streams_say_nothing_about_the_pace() -> None:
    slow = replace(GOOD, candidate=medians(9.0, 9.0, 4))
    decision = decide(STATE, slow, SETTINGS)
    assert decision.action == "promote"
    assert decision.why.endswith("; times of tokens not judged: 4 of 5 streams")
    assert "not judged" not in decide(STATE, GOOD, SETTINGS).why


@pytest.mark.parametrize("phase", ["running", "held", "complete"])
def test_harm_rolls_back_in_every_watched_phase(phase: Any) -> None:
    harmed = replace(GOOD, evidence=evidence(step=400), paused="even so", watched_s=0)
    decision = decide(replace(STATE, phase=phase), harmed, SETTINGS)
    assert (decision.action, decision.percent) == ("rollback", 0)
    assert decision.why.startswith("harm: ")
    assert "is 0.4 over 150, at most 0.1 is allowed" in decision.why


def test_what_is_measured_in_nats_is_told_in_nats() -> None:
    """As it was configured: the bound of the clip is no number that anybody gave."""
    for step, why in (
        (400, "harm: kl of all answers is 0.2 nats over 150, at most 0.05 nats is allowed"),
        (90, "kl is not proven to stay below 0.05 nats yet"),
    ):
        known = Evidence(BOUNDS, evidence(step=step).counts, {"kl": 0.5})
        assert decide(STATE, replace(GOOD, evidence=known), SETTINGS).why == why


@pytest.mark.parametrize("phase", ["held", "complete", "rolled_back", "manual"])
def test_other_phases_move_nowhere_by_themselves(phase: Any) -> None:
    assert decide(replace(STATE, phase=phase, why="x"), GOOD, SETTINGS).action == "wait"


class Clocks:
    """Two clocks that a test moves."""

    def __init__(self) -> None:
        self.monotonic_s, self.wall_s = 1000.0, 1.7e9
        self.step = StepClock(lambda: self.monotonic_s, lambda: self.wall_s)
        self.step.look(7)

    def after(self, monotonic_s: float, wall_s: float | None = None) -> float:
        self.monotonic_s += monotonic_s
        self.wall_s += monotonic_s if wall_s is None else wall_s
        return self.step.look(7)


def test_time_counts_while_both_clocks_agree() -> None:
    clocks = Clocks()
    assert [clocks.after(1), clocks.after(10), clocks.after(1, 1.4)] == [1, 11, 12]
    assert clocks.step.look(8) == 0


@pytest.mark.parametrize("by", [7200.0, -7200.0])
def test_a_wall_clock_that_jumps_begins_the_step_anew(by: float) -> None:
    clocks = Clocks()
    clocks.after(30)
    assert (clocks.after(1, 1 + by), clocks.step.jumped_s) == (0, by)
    assert clocks.after(1) == 1


def test_a_process_that_did_not_watch_gains_no_time() -> None:
    clocks = Clocks()
    clocks.after(30)
    assert clocks.after(3600) == 0


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({}, "'directory' is needed"),
        ({"directory": "/x", "steps": [0, 50, 10, 100]}, "must climb"),
        ({"directory": "/x", "steps": [0, 50]}, "must be 100"),
        ({"directory": "/x", "steps": [100]}, "comes before all evidence: give one below 100"),
        ({"directory": "/x", "every_s": 31}, "less than or equal to 30"),
        ({"directory": "/x", "store": "redis"}, "'directory' is needed"),
        ({"store": "redis"}, "'redis' is needed"),
        ({"directory": "/x", "webhook": "ftp://secret"}, "must be of the form https://host/path"),
        ({"directory": "/x", "step": 3}, "Extra inputs"),
    ],
)
def test_a_wrong_section_is_refused(section: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RolloutSettings.model_validate(section)


def test_weights_keep_the_pairs_share_and_the_others_as_configured() -> None:
    class OfVariant:
        def __init__(self, weight: float) -> None:
            self.settings = self
            self.weight = weight

    variants = {"base": OfVariant(3), "small": OfVariant(1), "other": OfVariant(2)}
    model: Any = SimpleNamespace(variants=variants)
    assert weights_of(replace(STATE, percent=10), model) == {
        "base": pytest.approx(3.6),
        "small": pytest.approx(0.4),
        "other": 2,
    }
