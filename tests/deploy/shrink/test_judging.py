"""Verdicts on figures that were measured before, and which miss is the nearest."""

from __future__ import annotations

import dataclasses
import math

import pytest
from shrink_room import make_try

from taut_deploy.frontier.judging import miss_of, rejudged
from taut_deploy.frontier.walk import Frontier
from taut_deploy.validate import Metric, Verdict
from taut_deploy.validate.policy import Policy


def policy(latency=None, **require) -> Policy:
    return Policy.model_validate({"name": "p", "require": require, "latency": latency})


def policy_of_kl(most: float) -> Policy:
    return policy(mean_kl={"max": most})


def measured(low: float, high: float):
    """A try with this interval of KL; the policy it was judged by wants nothing beyond accuracy."""
    metric = Metric((low + high) / 2, low, high, low, high)
    return make_try(
        metrics={"mean_kl": dataclasses.asdict(metric)},
        policy=policy_of_kl(9.0).model_dump(mode="json"),
    )


@pytest.mark.parametrize(
    ("most", "expected"),
    [(0.3, Verdict.PASS), (0.2, Verdict.INCONCLUSIVE), (0.05, Verdict.FAIL)],
)
def test_the_interval_decides(most, expected):
    judged = rejudged(measured(0.1, 0.3), policy_of_kl(most))
    assert judged is not None
    verdict, rules = judged
    assert verdict is expected
    assert [(rule["metric"], rule["limit"]) for rule in rules] == [("mean_kl", most)]


def test_figures_that_do_not_suffice_are_measured_anew():
    assert rejudged(measured(0.1, 0.3), policy(top1_agreement={"min": 0.5})) is None


def test_a_policy_that_judges_more_than_accuracy_is_measured_anew():
    old = measured(0.1, 0.3)
    asks_more = old.model_copy(update={"policy": {**old.policy, "tasks": {"mine": {}}}})
    assert rejudged(asks_more, policy_of_kl(1.0)) is None
    # Latency that is not required is never judged on directories.
    optional = policy({"required": False, "ttft_p50_ratio_at_most": 2.0}, mean_kl={"max": 1.0})
    assert rejudged(old, optional) is not None


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
    judged = rejudged(old, policy_of_kl(1.0))
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
