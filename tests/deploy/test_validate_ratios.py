"""Ratios of latency and their intervals: brute force, closed forms, simulated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from taut_deploy.validate.bootstrap import expanded_levels, resample_indices
from taut_deploy.validate.latency.measure import Block, Level
from taut_deploy.validate.latency.ratios import RATIOS, error_rate, level_ratios
from taut_deploy.validate.latency.stream import Answer, failed

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


def test_intervals_equal_a_loop_over_the_resamples():
    level = simulated(5, 1.2, blocks=9)
    found = level_ratios(level, 250, 7)
    gaps, throughputs = [], []
    for choice in resample_indices(9, 250, 7):
        pooled, rates = [], []
        for side in (0, 1):
            chosen = [level.pairs[i][side] for i in choice]
            answers = [answer for one in chosen for answer in one.answers]
            pooled.append(np.quantile([gap for answer in answers for gap in answer.gaps_s], 0.95))
            tokens = sum(answer.tokens for answer in answers)
            rates.append(tokens / sum(one.wall_s for one in chosen))
        gaps.append(pooled[1] / pooled[0])
        throughputs.append(rates[1] / rates[0])
    for name, drawn in (("itl_p95_ratio", gaps), ("throughput_ratio", throughputs)):
        low, high, one_low, one_high = np.quantile(drawn, expanded_levels(9))
        metric = found[name]
        assert metric.low == pytest.approx(low, rel=1e-12)
        assert metric.high == pytest.approx(high, rel=1e-12)
        assert metric.one_sided_low == pytest.approx(one_low, rel=1e-12)
        assert metric.one_sided_high == pytest.approx(one_high, rel=1e-12)
        assert low < metric.estimate < high


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


@pytest.fixture(scope="module")
def coverage() -> dict[str, tuple[float, float]]:
    """Name → (share of simulated runs whose interval holds the truth, share wholly above it)."""
    truth, trials = 1.3, 120
    counts = {name: [0, 0] for name in RATIOS}
    for seed in range(trials):
        for name, metric in level_ratios(simulated(seed, truth), 200, seed).items():
            true = 1 / truth if name == "throughput_ratio" else truth
            counts[name][0] += metric.low <= true <= metric.high
            counts[name][1] += metric.low > true
    return {name: (held / trials, above / trials) for name, (held, above) in counts.items()}


@pytest.mark.parametrize("name", RATIOS)
def test_intervals_cover_the_truth_about_as_often_as_they_say(coverage, name):
    held, _ = coverage[name]
    # Two standard errors of 120 trials at 95 % are 4 %.
    assert held >= 0.90


@pytest.mark.parametrize("name", ["ttft_p50_ratio", "itl_p50_ratio", "e2e_p50_ratio"])
def test_a_candidate_exactly_at_the_limit_seldom_fails(coverage, name):
    """FAIL takes the whole interval above: 2.5 % by its definition."""
    assert coverage[name][1] <= 0.05


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
