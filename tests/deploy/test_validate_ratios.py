"""Ratios of latency and their intervals: brute force, closed forms, simulated coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from taut_deploy.validate.bootstrap import expanded_levels, resample_indices
from taut_deploy.validate.latency import ratios
from taut_deploy.validate.latency.measure import Block, Level
from taut_deploy.validate.latency.ratios import (
    RATIOS,
    SAMPLES,
    error_rate,
    level_ratios,
    smooth_quantiles,
)
from taut_deploy.validate.latency.stream import Answer, failed
from taut_deploy.validate.outcome import Metric

GAPS = 7


def block(rng: np.random.Generator, scale: float, requests: int = 4) -> Block:
    """Answers of a machine whose times are ``scale`` × log-normal, one after the other."""
    answers = []
    for _ in range(requests):
        ttft = 0.05 * scale * rng.lognormal(0, 0.2)
        gaps = 0.01 * scale * rng.lognormal(0, 0.15, size=GAPS)
        answers.append(Answer(None, 200, ttft, ttft + gaps.sum(), tuple(gaps), GAPS + 1))
    return Block(tuple(answers), sum(answer.e2e_s for answer in answers), went_first=True)


def simulated(
    seed: int, ratio: float, *, blocks: int = 12, drift: float = 0.2, own: float = 0.05
) -> Level:
    """``drift`` is the log-normal spread that both models of a pair share, ``own`` what each has
    besides."""
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(blocks):
        shared = rng.lognormal(0, drift)
        scales = shared * rng.lognormal(0, own, size=2) * (1.0, ratio)
        pairs.append((block(rng, scales[0]), block(rng, scales[1])))
    return Level(4, tuple(pairs), 0.1)


def constant(seconds: float, blocks: int = 8) -> list[Block]:
    answer = Answer(None, 200, seconds, 8 * seconds, (seconds,) * GAPS, GAPS + 1)
    return [Block((answer,) * 4, 8 * seconds, went_first=True)] * blocks


def level_of(baseline: list[Block], candidate: list[Block]) -> Level:
    return Level(4, tuple(zip(baseline, candidate, strict=True)), 0.1)


def test_ratios_of_constant_times_are_exact_and_have_no_width():
    found = level_ratios(level_of(constant(0.1), constant(0.2)), 200, 0)
    assert tuple(found) == RATIOS
    for name, metric in found.items():
        expected = 0.5 if name == "throughput_ratio" else 2.0
        ends = (metric.low, metric.one_sided_low, metric.one_sided_high, metric.high)
        assert ends == pytest.approx([expected] * 4)
        assert metric.estimate == pytest.approx(expected)


def test_the_interval_of_a_tail_is_the_wider_one_of_a_loop_over_the_resamples():
    level = simulated(5, 1.2, blocks=9)
    metric = level_ratios(level, 250, 7)["itl_p95_ratio"]
    logs = []
    for choice in [range(9), *resample_indices(9, 250, 7)]:
        pooled = []
        for side in (0, 1):
            answers = [answer for i in choice for answer in level.pairs[i][side].answers]
            pooled.append(np.quantile([gap for answer in answers for gap in answer.gaps_s], 0.95))
        logs.append(math.log(pooled[1] / pooled[0]))
    estimate, *drawn = logs
    spread = np.std(drawn, ddof=1) * math.sqrt(9 / 8)
    gaps = [[answer.gaps_s for answer in side.answers] for pair in level.pairs for side in pair]
    tails = [np.quantile(gaps[side::2], 0.95) for side in (0, 1)]
    shares = [np.mean(np.array(gaps[i]) > tails[i % 2]) for i in range(18)]
    apart = np.subtract(shares[1::2], shares[::2])
    # Two degrees fewer than a variance of so many values with this kurtosis has.
    freedom = 2 * 9 / (stats.kurtosis(apart, fisher=False) - 1) - 2
    assert 2 < freedom < 7
    for ends, levels, alpha in (
        ((metric.low, metric.high), expanded_levels(9)[:2], 0.025),
        ((metric.one_sided_low, metric.one_sided_high), expanded_levels(9)[2:], 0.05),
    ):
        low, high = np.quantile(drawn, levels)
        student = stats.t.isf(alpha, freedom) * spread
        expected = min(low, estimate - student), max(high, estimate + student)
        assert ends == pytest.approx(np.exp(expected), rel=1e-12)
    assert metric.estimate == pytest.approx(math.exp(estimate), rel=1e-12)


def test_the_interval_of_a_throughput_is_the_jackknifes():
    level = simulated(5, 1.2, blocks=9)
    metric = level_ratios(level, 200, 7)["throughput_ratio"]

    def log_ratio(chosen):
        seconds = [sum(pair[side].wall_s for pair in chosen) for side in (0, 1)]
        return math.log(seconds[0] / seconds[1])  # equally many tokens

    pairs = level.pairs
    whole = log_ratio(pairs)
    left_out = [log_ratio([*pairs[:at], *pairs[at + 1 :]]) for at in range(9)]
    error = math.sqrt(8 / 9 * sum((one - whole) ** 2 for one in left_out))
    assert metric.estimate == pytest.approx(math.exp(whole))
    assert metric.low == pytest.approx(math.exp(whole - stats.t.isf(0.025, 7) * error))
    assert metric.one_sided_high == pytest.approx(math.exp(whole + stats.t.isf(0.05, 7) * error))


def test_a_smooth_median_is_what_draws_have_on_average():
    """Three draws of four values: of all 64, the mean median."""
    values = np.array([1.0, 2.0, 4.0, 9.0])
    medians = [np.median(draw) for draw in itertools.product(values, repeat=3)]
    assert smooth_quantiles(values, 0.5, 3) == pytest.approx(np.mean(medians))
    many = np.random.default_rng(0).lognormal(size=2001)
    assert smooth_quantiles(many, 0.5, 10**7) == pytest.approx(np.median(many), rel=1e-3)


def test_the_seed_alone_decides():
    level = simulated(5, 1.2)
    assert level_ratios(level, 200, 1) == level_ratios(level, 200, 1)
    assert level_ratios(level, 200, 1) != level_ratios(level, 200, 2)


def test_expanded_levels_undo_what_the_plain_percentiles_lack():
    """For a normal mean the bootstrap distribution is normal with the variance ÷ n: its expanded
    quantiles are then the ends of the Student t interval."""
    for blocks in (4, 8, 30):
        low, high, one_low, one_high = expanded_levels(blocks)
        assert (low + high, one_low + one_high) == pytest.approx((1.0, 1.0))
        width = stats.norm.ppf(high) * math.sqrt((blocks - 1) / blocks)
        assert width == pytest.approx(stats.t.ppf(0.975, blocks - 1))
        one_sided = stats.norm.ppf(one_high) * math.sqrt((blocks - 1) / blocks)
        assert one_sided == pytest.approx(stats.t.ppf(0.95, blocks - 1))
    assert expanded_levels(10**6) == pytest.approx([0.025, 0.975, 0.05, 0.95], abs=1e-5)


TRUTH = 1.3
RUNS = 2000
"""A share of 95 % of them is known to within 0.5 %, one standard error."""


@pytest.fixture(scope="module")
def sharp() -> dict[str, list[Metric]]:
    """Intervals of smooth ratios in simulated runs of the default number of blocks."""
    found: dict[str, list[Metric]] = {name: [] for name in RATIOS if "p95" not in name}
    for seed in range(RUNS):
        level = simulated(seed, TRUTH, blocks=(12, 24)[seed % 2], drift=(0.0, 0.2, 0.5)[seed % 3])
        for kind, samples in SAMPLES.items():
            pairs = [(np.array(samples(b)), np.array(samples(c))) for b, c in level.pairs]
            found[f"{kind}_p50_ratio"].append(ratios._median_ratio(pairs))
        found["throughput_ratio"].append(ratios._throughput_ratio(level))
    return found


def truth_of(name: str) -> float:
    return 1 / TRUTH if name == "throughput_ratio" else TRUTH


@pytest.mark.parametrize("name", [name for name in RATIOS if "p95" not in name])
def test_intervals_of_medians_and_throughput_hold_the_truth_in_95_percent(sharp, name):
    """Within one percent, on calm machines and on such whose speed wanders by half."""
    held = np.mean([metric.low <= truth_of(name) <= metric.high for metric in sharp[name]])
    print(f"{name}: {held:.2%}")
    assert held == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize("name", [name for name in RATIOS if "p95" not in name])
def test_a_candidate_exactly_at_the_limit_seldom_fails_or_passes(sharp, name):
    """Either takes the whole interval on one side: 2.5 % by its definition."""
    above = np.mean([metric.low > truth_of(name) for metric in sharp[name]])
    below = np.mean([metric.high < truth_of(name) for metric in sharp[name]])
    chance = 3 * math.sqrt(0.025 * 0.975 / RUNS)
    assert max(above, below) <= 0.025 + 0.005 + chance


@pytest.mark.parametrize("own", [0.05, 0.5])
def test_intervals_of_tails_hold_the_truth_at_least_in_95_percent(own):
    """A twentieth of the answers lies in few blocks, and in fewer the more these differ."""
    runs, held = 200, {"ttft": 0, "itl": 0}
    for seed in range(runs):
        level = simulated(seed, TRUTH, own=own)
        for kind in held:
            rows = [tuple(np.array(SAMPLES[kind](of)) for of in pair) for pair in level.pairs]
            metric = ratios._tail_ratio(rows, 100, seed)
            held[kind] += metric.low <= TRUTH <= metric.high
    print({kind: count / runs for kind, count in held.items()})
    # Less by two standard errors of so many runs.
    assert min(held.values()) / runs >= 0.95 - 2 * math.sqrt(0.05 * 0.95 / runs)


def test_what_hits_both_models_of_a_pair_alike_hardly_widens_the_throughput_ratio():
    calm, drifting = (
        level_ratios(simulated(2, 1.0, drift=drift, own=0.02), 400, 0)["throughput_ratio"]
        for drift in (0.0, 0.5)
    )
    assert drifting.high - drifting.low < 2 * (calm.high - calm.low)
    unpaired = level_ratios(simulated(2, 1.0, drift=0.0, own=0.5), 400, 0)["throughput_ratio"]
    assert unpaired.high - unpaired.low > 4 * (drifting.high - drifting.low)


def test_many_gaps_of_few_blocks_do_not_narrow_the_interval():
    """Why blocks are the unit: a hundred times the gaps at the same moments tell no more."""
    scales = np.random.default_rng(4).lognormal(0, 0.2, size=8)

    def answers(gaps: int, scale: float) -> Block:
        answer = Answer(None, 200, scale, scale * gaps, (scale,) * gaps, gaps + 1)
        return Block((answer,) * 4, scale * gaps, went_first=True)

    widths = []
    for gaps in (2, 200):
        level = level_of([answers(gaps, 1.0)] * 8, [answers(gaps, scale) for scale in scales])
        metric = level_ratios(level, 400, 0)["itl_p50_ratio"]
        widths.append(metric.high - metric.low)
    assert widths[1] == pytest.approx(widths[0], rel=1e-6)
    assert widths[0] > 0.1


def test_failed_requests_have_no_latency_but_cost_throughput():
    broken = [
        Block(
            (*one.answers[:2], *(failed("HTTP 500", 0.1, 500) for _ in range(2))), one.wall_s, True
        )
        for one in constant(0.1)
    ]
    found = level_ratios(level_of(constant(0.1), broken), 200, 0)
    assert found["ttft_p50_ratio"].estimate == pytest.approx(1.0)
    assert found["throughput_ratio"].estimate == pytest.approx(0.5)


@pytest.mark.parametrize("left", [5, 6])
def test_too_few_blocks_with_answers_give_no_ratio(left):
    lost = Block(tuple(failed("HTTP 500", 0.1, 500) for _ in range(4)), 0.1, went_first=True)
    candidate = [*constant(0.1, left), *[lost] * (8 - left)]
    found = level_ratios(level_of(constant(0.1), candidate), 200, 0)
    assert ("itl_p50_ratio" in found) == (left == 6)
    assert found["throughput_ratio"].estimate < 1.0, "a block without tokens is a slow one"
    assert level_ratios(level_of(candidate, constant(0.1)), 200, 0).keys() == (
        set(RATIOS) if left == 6 else set()
    )


def test_an_answer_in_one_read_has_no_gaps_and_no_inter_token_latency():
    answer = Answer(None, 200, 0.1, 0.1, (), 8)
    blocks = [Block((answer,) * 4, 0.1, went_first=True)] * 8
    found = level_ratios(level_of(blocks, blocks), 200, 0)
    assert {name for name in RATIOS if "itl" not in name} == set(found)


@pytest.mark.parametrize("sent", [32, 72, 192])
def test_the_error_rate_without_a_failure_is_the_closed_form(sent):
    metric = error_rate(0, sent)
    assert (metric.estimate, metric.low) == (0.0, 0.0)
    assert metric.high == pytest.approx(1 - 0.025 ** (1 / sent))
    assert metric.one_sided_high == pytest.approx(1 - 0.05 ** (1 / sent))


def test_the_error_rate_interval_holds_the_truth_at_least_as_often_as_it_says():
    """Exactly, by summing over all outcomes of 60 requests."""
    for truth in (0.01, 0.05, 0.3):
        held = sum(
            stats.binom.pmf(failures, 60, truth)
            for failures in range(61)
            if error_rate(failures, 60).low <= truth <= error_rate(failures, 60).high
        )
        assert held >= 0.95


def test_all_requests_failed():
    metric = error_rate(8, 8)
    assert (metric.estimate, metric.high) == (1.0, 1.0)
    assert metric.low == pytest.approx(0.025 ** (1 / 8))


def test_tokens_of_the_candidate_in_one_block_alone_bound_nothing_from_above():
    """Without that block it writes nothing: a ratio of zero has no logarithm."""
    lost = Block(tuple(failed("HTTP 500", 0.1, 500) for _ in range(4)), 0.1, went_first=True)
    found = level_ratios(level_of(constant(0.1), [*constant(0.1, 1), *[lost] * 7]), 200, 0)
    metric = found["throughput_ratio"]
    assert (metric.low, 0 < metric.estimate < 1, 1e5 < metric.high < 1e7) == (0.0, True, True)
    none = level_ratios(level_of(constant(0.1), [lost] * 8), 200, 0)["throughput_ratio"]
    assert (none.estimate, none.high) == (0.0, 0.0)
