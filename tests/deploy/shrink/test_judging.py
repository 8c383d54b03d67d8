"""Verdicts on figures that were measured before, and which miss is the nearest."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from shrink_room import make_try
from validate_setup import job_of

from taut_deploy.frontier.judging import beyond_text, miss_of, rejudged
from taut_deploy.frontier.walk import Frontier
from taut_deploy.validate import Metric, ValidationJob, Verdict
from taut_deploy.validate.policy import Policy, load_policy

JOB = {"baseline": "b", "candidate": "c", "text": Path("t"), "output": Path("o")}


def policy(**require) -> Policy:
    return Policy.model_validate({"name": "p", "require": require})


def policy_of_kl(most: float) -> Policy:
    return policy(mean_kl={"max": most})


def measured(low: float, high: float):
    """A try of two sequences with this interval of KL."""
    metric = Metric((low + high) / 2, low, high, low, high)
    return make_try(metrics={"mean_kl": dataclasses.asdict(metric)})


def again(old, new: Policy, **job):
    """What is said of a try under another policy."""
    return rejudged(old, new, job_of(**JOB, policy="p", **job))


@pytest.mark.parametrize(
    ("most", "expected"),
    [(0.3, Verdict.PASS), (0.2, Verdict.INCONCLUSIVE), (0.05, Verdict.FAIL)],
)
def test_the_interval_decides(most, expected):
    judged = again(measured(0.1, 0.3), policy_of_kl(most))
    assert judged is not None
    verdict, rules = judged
    assert verdict is expected
    assert [(rule["metric"], rule["limit"]) for rule in rules] == [("mean_kl", most)]


def test_figures_that_do_not_suffice_are_measured_anew():
    only_kl = measured(0.1, 0.3)
    assert again(only_kl, policy(top1_agreement={"min": 0.5})) is None


def test_what_more_draws_may_decide_is_measured_anew():
    undecided = policy_of_kl(0.2)
    assert again(measured(0.1, 0.3), undecided, sequences=2, max_sequences=4) is None
    assert again(measured(0.1, 0.3), undecided, sequences=2, max_sequences=2) is not None


def test_a_policy_that_asks_for_slices_or_tasks_is_measured_anew():
    old = measured(0.1, 0.3)
    sliced = Policy.model_validate(
        {"name": "p", "require": {"mean_kl": {"max": 1.0}}, "slices": {"code": {}}}
    )
    assert again(old, sliced) is None
    asked = beyond_text(sliced, ValidationJob(**JOB, policy="p"))
    assert again(old.model_copy(update={"beyond": asked}), sliced) is not None
    # Bounds of the command line's tasks bound none here, and latency that is not required is
    # never judged on directories: the built-in policies have both.
    built_in = load_policy("balanced").model_copy(update={"require": policy_of_kl(1.0).require})
    assert again(old, built_in) is not None


def test_what_a_worker_answered_still_fails_the_candidate():
    served = {
        "metric": "served_kl",
        "side": "max",
        "limit": 0.012,
        "verdict": "FAIL",
        "margin": -1.0,
        "reason": "what is served is not what was scored",
        "part": "accuracy",
    }
    old = measured(0.1, 0.3).model_copy(update={"rules": [served]})
    judged = again(old, policy_of_kl(1.0))
    assert judged is not None
    assert judged[0] is Verdict.FAIL
    assert judged[1][-1] == served


def missed(name: str, **rule):
    plain = {"verdict": "FAIL", "side": "max", "reason": "outside", "part": "accuracy"}
    return make_try(name, rules=[{**plain, **rule}])


def test_misses_are_compared_in_multiples_of_what_their_bounds_allow():
    # By hand: 0.02 of the allowed 0.03 too much, 0.04 of 0.05, 0.06 of 0.10.
    tries = (
        missed("ratio", metric="perplexity_ratio", limit=1.03, margin=-0.02),
        missed("kl", metric="mean_kl", limit=0.05, margin=-0.04),
        missed("top1", metric="top1_agreement", side="min", limit=0.9, margin=-0.06),
        missed("unmeasured", metric="served_kl", limit=0.012, margin=None),
    )
    excess = {one.name: miss_of(one) for one in tries}
    assert {name: miss and round(miss.excess, 6) for name, miss in excess.items()} == {
        "ratio": round(2 / 3, 6),
        "kl": 0.8,
        "top1": 0.6,
        "unmeasured": math.inf,
    }
    nearest = Frontier("none", tries, (), (), None).nearest_miss
    assert nearest is not None
    assert nearest.entry.name == "top1"


def test_a_try_misses_by_its_worst_bound():
    both = missed("both", metric="mean_kl", limit=0.05, margin=-0.04)
    small = dict(both.rules[0], metric="perplexity_ratio", limit=1.03, margin=-0.001)
    miss = miss_of(both.model_copy(update={"rules": [small, *both.rules]}))
    assert miss is not None
    assert miss.rule["metric"] == "mean_kl"
    assert miss_of(make_try(outcome="PASS")) is None
