"""A task judged: sub-tasks, more items until it is decided, what the report says of it."""

from __future__ import annotations

import numpy as np
import pytest

from taut_deploy.validate.bounds import TaskBounds
from taut_deploy.validate.outcome import Verdict
from taut_deploy.validate.paired.shares import items_needed, share_metrics
from taut_deploy.validate.tasks.answers import ItemScore, TaskAnswers
from taut_deploy.validate.tasks.items import Item
from taut_deploy.validate.tasks.judged import ask_until_decided, shuffled
from taut_deploy.validate.tasks.section import task_section


def items(count, subtasks=None):
    return [
        Item(prompt=f"p{i}", reference="r", id=str(i), subtask=subtasks and f"s{i % subtasks}")
        for i in range(count)
    ]


def score(right):
    return ItemScore(bool(right), None, "yes" if right else "no")


def asked(bounds, baseline, candidate, *, first_look=50, subtasks=None):
    """Ask about items whose answers are known by their identity."""
    seen = []
    judged = ask_until_decided(
        TaskAnswers("t"),
        items(len(baseline), subtasks),
        bounds,
        lambda item: (score(baseline[int(item.id)]), score(candidate[int(item.id)])),
        resamples=300,
        seed=0,
        on_item=lambda done, total: seen.append((done, total)),
        first_look=first_look,
    )
    return judged, seen


def test_an_equal_candidate_passes_before_all_items_are_asked():
    answers = np.arange(1000) % 3 > 0
    bounds = TaskBounds.model_validate({"recovery": {"min": 0.9}})
    judged, seen = asked(bounds, answers, answers)
    assert [rule.verdict for rule in judged.rules] == [Verdict.PASS]
    assert judged.looks == judged.planned[: len(judged.looks)]
    assert len(seen) == judged.looks[-1] < 1000
    assert judged.z > 1.96, "an early look has a wider interval"


def test_a_ruined_candidate_fails_early_and_an_undecided_one_uses_all():
    generator = np.random.default_rng(0)
    good = generator.random(800) < 0.7
    bounds = TaskBounds.model_validate({"difference": {"min": -0.02}})
    judged, _ = asked(bounds, good, good & (generator.random(800) < 0.6))
    assert judged.rules[0].verdict is Verdict.FAIL
    assert judged.looks[-1] < 800
    slightly = np.where(generator.random(800) < 0.04, ~good, good)
    judged, _ = asked(bounds, good, slightly)
    assert judged.looks == judged.planned == (50, 100, 200, 400, 800)
    assert judged.rules[0].verdict is Verdict.INCONCLUSIVE
    assert "more items" in judged.rules[0].reason


def test_without_limits_all_items_are_asked_and_nothing_is_judged():
    answers = np.ones(120, bool)
    judged, _ = asked(TaskBounds(), answers, answers)
    assert (judged.rules, judged.looks) == ((), (120,))
    assert judged.z == pytest.approx(1.96, abs=1e-3)


def test_a_baseline_that_knows_nothing_leaves_recovery_undecided():
    wrong = np.zeros(60, bool)
    judged, _ = asked(TaskBounds.model_validate({"recovery": {"min": 0.9}}), wrong, ~wrong)
    assert judged.rules[0].verdict is Verdict.INCONCLUSIVE
    assert "recovery" not in judged.metrics


def test_items_are_asked_in_an_order_drawn_once():
    first, again = shuffled(items(50), 20, 1), shuffled(items(50), 20, 1)
    assert first == again
    assert [item.id for item in first] != [str(i) for i in range(20)]


def test_subtasks_widen_the_interval_where_harm_comes_in_groups():
    groups = [f"s{i // 50}" for i in range(1000)]
    baseline = np.ones(1000, bool)
    candidate = np.array([int(group[1:]) % 5 != 0 or i % 2 == 0 for i, group in enumerate(groups)])
    alone = share_metrics(baseline, candidate, None, 1.96, resamples=300, seed=0)
    grouped = share_metrics(baseline, candidate, groups, 1.96, resamples=300, seed=0)
    assert grouped["difference"].estimate == alone["difference"].estimate == -0.1
    width = {
        name: m["difference"].high - m["difference"].low
        for name, m in (("alone", alone), ("grouped", grouped))
    }
    assert width["grouped"] > 2 * width["alone"]
    one = share_metrics(baseline, candidate, ["s"] * 1000, 1.96, resamples=300, seed=0)
    assert one == alone, "a single group says nothing about others"


def test_the_section_counts_flips_and_shows_some():
    baseline = np.array([1, 1, 1, 0, 0, 1], bool)
    candidate = np.array([1, 0, 1, 1, 0, 0], bool)
    bounds = TaskBounds.model_validate({"difference": {"min": -0.1}})
    judged, _ = asked(bounds, baseline, candidate, first_look=6)
    section = task_section(judged, bounds, "generated", "t.jsonl", "0" * 64, 6)
    assert section["counts"] == {
        "both": 2,
        "baseline_only": 2,
        "candidate_only": 1,
        "neither": 1,
    }
    assert section["accuracy"]["baseline"] == {"sum": 4 / 6, "per_byte": None}
    assert section["answers_changed"] == 0.5
    # Of three flips one way once: 2 * (1/8 + 3/8 / 2) + ... = 2 * P(X <= 1) - P(X = 1) = 0.625
    assert section["mcnemar_p"] == pytest.approx(0.625)
    assert [row["id"] for row in section["flipped"]] == ["1", "3", "5"]
    assert section["power"]["items_for_80"] == items_needed(0.5, 0.1)


@pytest.mark.parametrize("each", [1, 4])
def test_subtasks_that_are_all_alike_are_no_proof(each):
    """Two sub-tasks without a flip: the interval is that of as many single items."""
    groups = ["a"] * each + ["b"] * each
    baseline = np.arange(2 * each) % 2 == 0
    alike = share_metrics(baseline, baseline, groups, 1.96, resamples=300, seed=0)
    assert alike == share_metrics(baseline, baseline, None, 1.96, resamples=300, seed=0)
    for name in ("difference", "flips", "recovery"):
        assert alike[name].high - alike[name].low > 0.3


def test_a_task_without_a_flip_still_needs_the_items_that_bound_them():
    needed = items_needed(0.0, 0.02)
    assert needed == 189
    right = np.zeros(needed, bool)
    for items, within in ((needed, True), (needed - 10, False)):
        rows = right[:items]
        metrics = share_metrics(rows, rows, None, 1.959964, resamples=200, seed=0)
        assert (metrics["difference"].low >= -0.02) == within


def test_the_items_that_power_needs_are_those_of_a_simulation():
    flips, margin = 0.1, 0.03
    needed = items_needed(flips, margin)
    # The squared sum of 1.96 and 0.8416, 7.849, times flips over the squared margin.
    assert needed == pytest.approx(872, abs=2)
    generator = np.random.default_rng(2)
    found = 0
    for _ in range(400):
        kinds = generator.choice(4, size=needed, p=(0.6, 0.05, 0.05, 0.3))
        baseline, candidate = kinds < 2, (kinds == 0) | (kinds == 2)
        metrics = share_metrics(baseline, candidate, None, 1.96, resamples=200, seed=0)
        found += metrics["difference"].low >= -margin
    assert found / 400 == pytest.approx(0.8, abs=0.06)
    assert items_needed(0.1, 0.0) is None


@pytest.mark.parametrize(("metric", "side"), [("difference", "min"), ("flips", "max")])
def test_a_task_at_its_limit_passes_in_at_most_one_run_of_twenty(metric, side):
    """The whole way: items drawn, looks, boundaries, limits."""
    shares = (0.62, 0.08, 0.05, 0.25)
    limit = {"difference": 0.05 - 0.08, "flips": 0.13}[metric]
    bounds = TaskBounds.model_validate({metric: {side: limit}})
    generator = np.random.default_rng(23)
    passed = failed = 0
    runs = 300
    for _ in range(runs):
        kinds = generator.choice(4, size=240, p=shares)
        judged, _ = asked(bounds, kinds < 2, (kinds == 0) | (kinds == 2), first_look=60)
        passed += judged.rules[0].verdict is Verdict.PASS
        failed += judged.rules[0].verdict is Verdict.FAIL
    assert passed / runs <= 0.05
    assert failed / runs <= 0.05
