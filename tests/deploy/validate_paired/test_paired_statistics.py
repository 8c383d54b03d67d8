"""Tests and intervals of paired answers, against brute force, publications and simulation."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from taut_deploy.validate.paired.clusters import ClusterRatio, ratio_interval
from taut_deploy.validate.paired.counts import PairedCounts, count_pairs
from taut_deploy.validate.paired.difference import difference_interval
from taut_deploy.validate.paired.holm import holm_adjusted
from taut_deploy.validate.paired.mcnemar import mid_p_value
from taut_deploy.validate.paired.recovery import recovery_interval
from taut_deploy.validate.paired.spending import boundaries, looks
from taut_deploy.validate.paired.wilson import wilson_interval

Z = 1.959964
# Shares of (both, baseline only, candidate only, neither): near chance, good, very good models.
SHARES = [(0.60, 0.06, 0.05, 0.29), (0.35, 0.10, 0.07, 0.48), (0.85, 0.03, 0.03, 0.09)]


def drawn(shares, items, runs, seed=0):
    generator = np.random.default_rng(seed)
    return [PairedCounts(*map(int, row)) for row in generator.multinomial(items, shares, runs)]


def covered(runs, interval, truth):
    ends = [interval(counts, Z) for counts in runs]
    return np.mean([low <= truth <= high for low, high in ends])


def test_pairs_are_counted():
    baseline = np.array([True, True, True, False, False])
    candidate = np.array([True, False, False, True, False])
    counts = count_pairs(baseline, candidate)
    assert counts == PairedCounts(both=1, baseline_only=2, candidate_only=1, neither=1)
    assert (counts.items, counts.baseline_right, counts.candidate_right) == (5, 3, 2)


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (3, 5), (4, 4), (0, 7)])
def test_the_mid_p_value_is_that_of_all_outcomes_of_the_flips(better, worse):
    ways = [sum(way) for way in itertools.product((0, 1), repeat=better + worse)]
    fewer = min(better, worse)
    below = sum(way < fewer for way in ways) / len(ways)
    equal = sum(way == fewer for way in ways) / len(ways)
    expected = min(1.0, 2 * (below + equal / 2))
    assert mid_p_value(PairedCounts(9, worse, better, 3)) == pytest.approx(expected)


@pytest.mark.parametrize(("items", "share"), [(100, 0.1), (400, 0.05), (400, 0.2), (1300, 0.1)])
def test_the_mid_p_test_errs_at_most_at_its_level(items, share):
    """Exactly, over every number of flips that as many items have."""
    errs = 0.0
    for flips, chance in enumerate(stats.binom.pmf(range(items + 1), items, share)):
        if chance > 1e-9:
            counts = [PairedCounts(0, k, flips - k, 0) for k in range(flips + 1)]
            rejected = np.array([mid_p_value(c) <= 0.05 for c in counts])
            errs += chance * float(stats.binom.pmf(range(flips + 1), flips, 0.5) @ rejected)
    assert 0.03 <= errs <= 0.0505


def test_newcombe_gives_the_published_example():
    # Newcombe 1998, table III, method 10, of 36, 12, 2, 0.
    low, high = difference_interval(PairedCounts(36, 2, 12, 0), Z)
    assert (round(low, 4), round(high, 4)) == (0.0569, 0.3404)


def test_equal_answers_have_a_narrow_interval_around_no_difference():
    low, high = difference_interval(PairedCounts(60, 0, 0, 40), Z)
    assert low == pytest.approx(-high)
    assert 0 < high < 0.03
    low, high = recovery_interval(PairedCounts(60, 0, 0, 40), Z)
    assert low * high == pytest.approx(1.0)


@pytest.mark.parametrize("shares", SHARES)
def test_intervals_of_paired_proportions_cover(shares):
    both, worse, better, _ = shares
    runs = drawn(shares, 400, 4000)
    difference, ratio = better - worse, (both + better) / (both + worse)
    assert covered(runs, difference_interval, difference) == pytest.approx(0.95, abs=0.01)
    assert covered(runs, recovery_interval, ratio) == pytest.approx(0.95, abs=0.01)


def test_wilson_agrees_with_scipy():
    for right, items in ((0, 20), (3, 20), (20, 20), (151, 400)):
        expected = stats.binomtest(right, items).proportion_ci(method="wilson")
        assert wilson_interval(right, items, stats.norm.isf(0.025)) == pytest.approx(
            (expected.low, expected.high)
        )


def test_holm_steps_down():
    # Sorted 0.01, 0.02, 0.03 times 3, 2, 1; never less than the one before.
    values = {"b": 0.02, "a": 0.01, "c": 0.03}
    assert holm_adjusted(values) == {"b": 0.04, "a": 0.03, "c": 0.04}
    assert holm_adjusted({"only": 0.7, "other": 0.9}) == {"only": 1.0, "other": 1.0}
    assert holm_adjusted({}) == {}


def test_holm_keeps_the_familys_error():
    generator = np.random.default_rng(3)
    wrong = 0
    for _ in range(2000):
        shared = generator.normal()
        z = 0.7 * shared + math.sqrt(1 - 0.49) * generator.normal(size=5)
        values = {str(i): float(2 * stats.norm.sf(abs(v))) for i, v in enumerate(z)}
        wrong += min(holm_adjusted(values).values()) <= 0.05
    assert wrong / 2000 <= 0.05 + 0.01


def test_an_interval_over_clusters_covers_where_items_hang_together():
    generator = np.random.default_rng(5)
    runs, truth = 2500, -0.03
    covered = naive = 0
    for run in range(runs):
        sizes = generator.integers(15, 45, 30)
        harm = generator.normal(truth, 0.08, 30)  # each sub-task loses differently
        gained = generator.binomial(sizes, np.maximum(harm, 0))
        change = (gained - generator.binomial(sizes, np.maximum(-harm, 0))).astype(float)
        ratio = ClusterRatio(change, sizes.astype(float))
        low, high = ratio_interval(ratio, 0.05, resamples=300, seed=run)
        covered += low <= truth <= high
        error = math.sqrt(np.abs(change).sum()) / sizes.sum()
        naive += abs(change.sum() / sizes.sum() - truth) <= 1.96 * error
    assert covered / runs == pytest.approx(0.95, abs=0.01)
    assert naive / runs < 0.9, "the items of this simulation do hang together"


@pytest.mark.parametrize("prompts", [4, 12, 20])
def test_intervals_over_the_prompts_of_a_slice_cover(prompts):
    """Likelihoods over texts and ratios of lengths; four are the windows of a long context."""
    generator, runs = np.random.default_rng(7), 1500
    covered = {"likelihood": 0, "lengths": 0}
    for run in range(runs):
        tokens = generator.integers(20, 60, prompts).astype(float)
        each = tokens * generator.gamma(4.0, 0.25, prompts)
        low, high = ratio_interval(ClusterRatio(each, tokens), 0.05, resamples=300, seed=run)
        covered["likelihood"] += low <= 1.0 <= high
        lengths = tokens * generator.lognormal(0.0, 0.3, prompts)
        low, high = ratio_interval(ClusterRatio(lengths, tokens), 0.05, resamples=300, seed=run)
        covered["lengths"] += low <= math.exp(0.045) <= high
    # 95 % within one percent, and two standard errors of so many runs on top.
    for name, count in covered.items():
        assert count / runs == pytest.approx(0.95, abs=0.01 + 0.011), name


@pytest.mark.parametrize("prompts", [12, 20])
@pytest.mark.parametrize("shares", SHARES)
def test_intervals_of_shares_over_few_prompts_cover_at_least(shares, prompts):
    """Of so few whole numbers no interval covers exactly: these are wide, not wrong."""
    both, worse, better, _ = shares
    runs = drawn(shares, prompts, 4000)
    assert covered(runs, difference_interval, better - worse) >= 0.95
    right = [counts for counts in runs if counts.baseline_right]
    assert covered(right, recovery_interval, (both + better) / (both + worse)) >= 0.95
    agree = [wilson_interval(prompts - counts.flips, prompts, Z) for counts in runs]
    # Wilson's covers 95 % on the average over shares; of one share it may be a percent less.
    held = np.mean([low <= 1 - worse - better <= high for low, high in agree])
    assert held >= 0.93


def test_equal_clusters_have_no_width():
    ratio = ClusterRatio(np.array([2.0, 4.0]), np.array([4.0, 8.0]))
    assert ratio_interval(ratio, 0.05, resamples=200, seed=0) == (0.5, 0.5)


def test_boundaries_are_those_that_are_published():
    # Five equal looks, one-sided 0.025, Lan and DeMets' spending after O'Brien and Fleming: as
    # tables of group-sequential designs print them.
    assert boundaries((1, 2, 3, 4, 5)) == pytest.approx(
        (4.8769, 3.3569, 2.6803, 2.2898, 2.0310), abs=2e-4
    )
    assert boundaries((1, 2)) == pytest.approx((2.9626, 1.9686), abs=2e-4)
    assert boundaries((7,)) == pytest.approx((Z,), abs=1e-6)


def test_looks_double_until_all_is_used():
    assert looks(100, 1000) == (100, 200, 400, 800, 1000)
    assert looks(100, 60) == (60,)
    assert looks(100, 100) == (100,)


@pytest.mark.parametrize("limit_side", ["pass", "fail"])
def test_stopping_at_the_first_clear_answer_errs_at_most_at_the_level(limit_side):
    """A candidate exactly at the limit passes (or fails) in at most 2.5 % of all runs."""
    sizes = looks(100, 800)
    zs = boundaries(sizes)
    shares = np.array((0.62, 0.08, 0.05, 0.25))
    limit = shares[2] - shares[1]
    generator = np.random.default_rng(11)
    wrong = once = 0
    runs = 3000
    for _ in range(runs):
        kinds = generator.choice(4, size=sizes[-1], p=shares)
        decided = naive = False
        for size, z in zip(sizes, zs, strict=True):
            counts = PairedCounts(*np.bincount(kinds[:size], minlength=4).tolist())
            ends = difference_interval(counts, z), difference_interval(counts, Z)
            outside = [low >= limit if limit_side == "pass" else high < limit for low, high in ends]
            decided, naive = decided or outside[0], naive or outside[1]
        wrong, once = wrong + decided, once + naive
    assert wrong / runs <= 0.025 + 0.008
    assert once / runs > 0.04, "looking four times with 1.96 errs more often"
