"""Intervals, metrics and divergences against brute force."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from taut_deploy.validate.bootstrap import mean_interval, quantile_intervals, resample_indices
from taut_deploy.validate.divergence import (
    Comparison,
    FullDistribution,
    TopKDistribution,
    compare,
    kl_lower_bound,
)
from taut_deploy.validate.gate import judge
from taut_deploy.validate.metrics import (
    kl_tail,
    mean_delta_p,
    measure,
    perplexities,
    point_estimates,
)
from taut_deploy.validate.outcome import Metric, Verdict
from taut_deploy.validate.policy import parse_policy


def comparison_of(baseline_nll, candidate_nll, kl=None, top=None) -> Comparison:
    baseline_nll, candidate_nll = np.asarray(baseline_nll, float), np.asarray(candidate_nll, float)
    kl = np.abs(candidate_nll - baseline_nll) if kl is None else np.asarray(kl, float)
    same = np.zeros(kl.shape, int)
    return Comparison(
        baseline_nll, candidate_nll, kl, same, same if top is None else top, kl_is_lower_bound=False
    )


def test_mean_interval_equals_a_loop_over_the_resamples():
    values = np.array([0.3, 1.7, 0.2, 0.9, 4.1])
    indices = resample_indices(5, 400, seed=3)
    error = values.std(ddof=1) / math.sqrt(5)
    pivots = []
    for choice in indices:
        drawn = [values[i] for i in choice]
        mean = sum(drawn) / 5
        spread = math.sqrt(sum((x - mean) ** 2 for x in drawn) / 4) / math.sqrt(5)
        pivots.append((mean - values.mean()) / (spread if len(set(drawn)) > 1 else error))
    # Student's 2.776 for four degrees of freedom, where the resamples say less.
    low, high = (
        max(np.quantile(pivots, 0.975), 2.776445),
        min(np.quantile(pivots, 0.025), -2.776445),
    )

    interval = mean_interval(values, indices)

    assert interval.estimate == pytest.approx(1.44)
    assert interval.low == pytest.approx(values.mean() - low * error, rel=1e-6)
    assert interval.high == pytest.approx(values.mean() - high * error, rel=1e-6)
    assert interval.low < interval.one_sided_low < interval.one_sided_high < interval.high


@pytest.mark.parametrize(
    ("draw", "mean", "least"),
    [
        (lambda rng: rng.normal(2.0, 1.0, size=24), 2.0, 0.92),
        (lambda rng: rng.exponential(1.0, size=24), 1.0, 0.90),
    ],
    ids=["normal", "skewed"],
)
def test_mean_interval_covers_the_truth_about_as_often_as_it_says(draw, mean, least):
    rng = np.random.default_rng(11)
    trials, covered = 400, 0
    for trial in range(trials):
        interval = mean_interval(draw(rng), resample_indices(24, 400, seed=trial))
        covered += interval.low <= mean <= interval.high
    assert least <= covered / trials <= 0.98


@pytest.mark.parametrize(
    ("draw", "mean"),
    [
        (lambda rng: rng.normal(2.0, 1.0, size=32), 2.0),
        (lambda rng: rng.gamma(4.0, 0.25, size=32), 1.0),  # skewed, as the KL of sequences is
        (lambda rng: rng.exponential(1.0, size=32), 1.0),
        # Shares of 60 positions, each sequence with one of its own: top-1 agreement.
        (lambda rng: rng.binomial(60, rng.beta(27, 3, size=32)) / 60, 0.9),
    ],
    ids=["normal", "skewed", "very skewed", "shares"],
)
def test_intervals_of_the_default_number_of_sequences_cover_95_percent(draw, mean):
    """Within one percent; of perplexity ratio, KL and agreement alike, which are such means."""
    rng = np.random.default_rng(23)
    runs = 2000
    covered = 0
    for run in range(runs):
        interval = mean_interval(draw(rng), resample_indices(32, 800, seed=run))
        covered += interval.low <= mean <= interval.high
    print(f"{covered / runs:.2%}")
    assert covered / runs == pytest.approx(0.95, abs=0.01)


def test_a_candidate_exactly_at_its_limit_is_decided_in_at_most_5_percent_of_runs():
    """Of 100 such candidates at most 2.5 pass and 2.5 fail; a normal 95 % interval does as much."""
    policy = parse_policy("name: p\nrequire: {mean_kl: {max: 0.02}}", "p")
    rng, runs = np.random.default_rng(31), 800
    decided = {Verdict.PASS: 0, Verdict.FAIL: 0, Verdict.INCONCLUSIVE: 0}
    for run in range(runs):
        kl = rng.gamma(6.0, 0.02 / 6.0, size=(32, 1)) * rng.gamma(1.0, 1.0, size=(32, 8))
        interval = mean_interval(kl.mean(axis=1), resample_indices(32, 200, run))
        measured = {"mean_kl": Metric(**asdict(interval))}
        verdict, _ = judge(policy, measured, accept_lower_bound=False, sequences=32)
        decided[verdict] += 1
    chance = 3 * math.sqrt(0.025 * 0.975 / runs)
    assert decided[Verdict.PASS] / runs <= 0.025 + chance
    assert decided[Verdict.FAIL] / runs <= 0.025 + chance


@pytest.mark.parametrize("blocks", [2, 3, 5])
def test_few_blocks_rarely_put_the_truth_on_the_wrong_side(blocks):
    """A PASS needs the whole interval inside a limit: at most 2.5 % of the time for a bad model."""
    rng = np.random.default_rng(3)
    trials = 1000
    false = sum(
        mean_interval(rng.normal(1.0, 1.0, blocks), resample_indices(blocks, 200, trial)).high < 1.0
        for trial in range(trials)
    )
    assert false / trials < 0.025 + 3 * math.sqrt(0.025 * 0.975 / trials)


def test_mean_interval_of_normal_data_agrees_with_student():
    values = np.random.default_rng(5).normal(size=400)
    interval = mean_interval(values, resample_indices(400, 4000, seed=1))
    expected = stats.t.interval(0.95, 399, values.mean(), values.std(ddof=1) / 20)
    width = expected[1] - expected[0]
    assert interval.low == pytest.approx(expected[0], abs=0.06 * width)
    assert interval.high == pytest.approx(expected[1], abs=0.06 * width)


def test_equal_blocks_give_an_interval_without_width():
    interval = mean_interval(np.full(4, 0.1), resample_indices(4, 300, seed=0))
    assert (interval.low, interval.estimate, interval.high) == (0.1, 0.1, 0.1)


def test_one_odd_block_gives_a_finite_interval():
    interval = mean_interval(np.array([1.0, 1.0, 1.0, 0.9]), resample_indices(4, 300, seed=0))
    assert math.isfinite(interval.low)
    assert math.isfinite(interval.high)
    assert interval.low < interval.high


def test_a_quantiles_interval_ends_where_shares_above_a_value_refute_it():
    values = np.random.default_rng(2).exponential(size=(8, 40))
    indices = resample_indices(8, 250, seed=9)
    (found,) = quantile_intervals(values, [0.9], indices)

    def share(value):
        return mean_interval(np.array([np.mean(row > value) for row in values]), indices)

    def before(value):
        return np.max(values[values < value])

    assert found.estimate == np.quantile(values, 0.9)
    assert found.low < found.one_sided_low < found.one_sided_high < found.high
    assert share(found.low).low <= 0.1 < share(before(found.low)).low
    lows = share(found.one_sided_low), share(before(found.one_sided_low))
    assert lows[0].one_sided_low <= 0.1 < lows[1].one_sided_low
    assert share(found.high).high < 0.1 <= share(before(found.high)).high
    highs = share(found.one_sided_high), share(before(found.one_sided_high))
    assert highs[0].one_sided_high < 0.1 <= highs[1].one_sided_high


def test_intervals_of_quantiles_hold_the_truth_at_least_as_often_as_they_say():
    """KL of positions that hang together in sequences, the default number of these."""
    rng, runs, probabilities = np.random.default_rng(13), 200, [0.5, 0.9, 0.99]

    def draw(sequences, positions):
        level = rng.gamma(6.0, 1 / 6, size=(sequences, 1))
        return level * rng.exponential(size=(sequences, positions)) ** 1.5

    truths = np.quantile(draw(200_000, 10), probabilities)
    held = np.zeros(3)
    for run in range(runs):
        found = quantile_intervals(draw(32, 64), probabilities, resample_indices(32, 200, run))
        held += [one.low <= truth <= one.high for one, truth in zip(found, truths, strict=True)]
    # Less by two standard errors of so many runs.
    assert min(held) / runs >= 0.95 - 2 * math.sqrt(0.05 * 0.95 / runs)


def test_a_quantile_beyond_what_was_seen_has_no_upper_end():
    values = np.random.default_rng(2).exponential(size=(8, 20))
    indices = resample_indices(8, 250, seed=9)
    few, many = quantile_intervals(values, [0.99, 0.9], indices)
    assert few.high == few.one_sided_high == 1e6, "0.99 ** 160 is a fifth"
    assert many.high <= values.max()
    assert few.low < values.max()


def test_the_seed_alone_decides_the_resamples():
    assert np.array_equal(resample_indices(8, 50, 4), resample_indices(8, 50, 4))
    assert not np.array_equal(resample_indices(8, 50, 4), resample_indices(8, 50, 5))


def test_metrics_match_their_definitions():
    baseline, candidate = np.array([[1.0, 2.0], [0.5, 3.0]]), np.array([[1.2, 2.0], [0.4, 3.5]])
    kl, top = np.array([[0.1, 0.0], [0.3, 0.2]]), np.array([[0, 0], [7, 0]])
    comparison = comparison_of(baseline, candidate, kl, top)
    measured = measure(comparison, None, resamples=300, seed=0)
    delta = np.exp(-candidate) - np.exp(-baseline)

    assert measured["delta_nll"].estimate == pytest.approx(0.15)
    assert measured["perplexity_ratio"].estimate == pytest.approx(math.exp(0.15))
    assert measured["mean_kl"].estimate == pytest.approx(0.15)
    assert measured["kl_p50"].estimate == pytest.approx(0.15)
    assert measured["top1_agreement"].estimate == 0.75
    assert measured["rms_delta_p"].estimate == pytest.approx(math.sqrt((delta**2).mean()))
    assert mean_delta_p(comparison) == pytest.approx(delta.mean())
    assert kl_tail(comparison)["max"] == 0.3
    assert perplexities(comparison)["baseline"] == pytest.approx(math.exp(1.625))
    points = point_estimates(comparison)
    assert points == pytest.approx({name: metric.estimate for name, metric in measured.items()})


def test_the_comparison_is_paired():
    """What shifts both models alike, such as a hard sequence, leaves the ratio and its interval
    alone."""
    rng = np.random.default_rng(0)
    baseline = rng.exponential(2.0, size=(12, 30))
    candidate = baseline + rng.normal(0.05, 0.1, size=baseline.shape)
    shift = rng.exponential(5.0, size=(12, 1))
    plain = measure(comparison_of(baseline, candidate), None, resamples=300, seed=0)
    shifted = measure(
        comparison_of(baseline + shift, candidate + shift), None, resamples=300, seed=0
    )
    for end in ("estimate", "low", "high"):
        pair = getattr(plain["perplexity_ratio"], end), getattr(shifted["perplexity_ratio"], end)
        assert pair[0] == pytest.approx(pair[1], rel=1e-9)


def test_agreement_and_kl_intervals_stay_in_their_range():
    kl = np.zeros((6, 40))
    kl[0, 0] = 1.0
    top = (kl > 0).astype(int)
    measured = measure(comparison_of(kl, kl, kl, top), None, resamples=300, seed=0)
    assert measured["top1_agreement"].high <= 1.0
    assert measured["mean_kl"].low >= 0.0


def test_agreement_that_is_alike_in_all_sequences_is_as_sure_as_its_positions():
    """Two short sequences without a difference prove no agreement of 99 %."""
    top, nll = np.zeros((2, 7), int), np.ones((2, 7))
    loss = np.linspace(0.001, 0.002, 14).reshape(2, 7)
    measured = measure(comparison_of(nll, nll + loss, loss, top), None, resamples=300, seed=0)
    share = measured["top1_agreement"]
    assert (share.estimate, share.high) == (1.0, 1.0)
    assert share.low == pytest.approx(14 / (14 + 1.959964**2))
    assert share.low < share.one_sided_low < 0.9
    same = measure(comparison_of(nll, nll, 0 * loss, top), None, resamples=300, seed=0)
    assert same["top1_agreement"].low == 1.0  # one and the same model


def test_a_ruined_candidate_has_a_finite_perplexity():
    ruined = np.linspace(1e5, 2e5, 12).reshape(3, 4)
    comparison = comparison_of(np.ones((3, 4)), ruined)
    measured = measure(comparison, None, resamples=200, seed=0)
    assert 1e300 < measured["perplexity_ratio"].estimate < math.inf
    assert 1e300 < perplexities(comparison)["candidate"] < math.inf


def test_noise_floor_is_reported_beside_every_metric():
    noise = comparison_of([[1.0, 1.0]], [[1.0, 1.1]])
    measured = measure(
        comparison_of(np.ones((3, 4)), np.ones((3, 4))), noise, resamples=200, seed=0
    )
    assert measured["delta_nll"].noise == pytest.approx(0.05)
    assert all(metric.noise is not None for metric in measured.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_full_divergence_matches_scipy_in_fp64(dtype):
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(300, 50, generator=generator).mul(4).to(dtype) for _ in range(2))
    targets = torch.randint(50, (300,), generator=generator)
    result = compare(FullDistribution(p), FullDistribution(q), targets)
    log_p, log_q = (special.log_softmax(x.double().numpy(), axis=-1) for x in (p, q))
    rows = np.arange(300)
    # The logits are exactly representable in fp64, so what remains is the fp32 log-softmax: no bf16
    # rounding.
    assert result.kl == pytest.approx(
        stats.entropy(np.exp(log_p), np.exp(log_q), axis=-1), abs=1e-5
    )
    assert result.baseline_nll == pytest.approx(-log_p[rows, targets], abs=1e-5)
    assert result.candidate_nll == pytest.approx(-log_q[rows, targets], abs=1e-5)
    assert (result.baseline_top1 == p.argmax(-1).numpy()).all()
    assert result.kl_is_lower_bound is False


def test_equal_logits_diverge_by_exactly_nothing():
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)) * 20
    result = compare(FullDistribution(logits), FullDistribution(logits.clone()), torch.arange(5))
    assert (result.kl == 0.0).all()
    assert (result.baseline_nll == result.candidate_nll).all()


def top_k_of(logits: torch.Tensor, k: int, targets: torch.Tensor) -> TopKDistribution:
    logprobs = logits.double().log_softmax(-1)
    ids = logits.topk(k).indices.tolist()
    rows = zip(logprobs, ids, targets.tolist(), strict=True)
    return TopKDistribution(tuple({i: row[i].item() for i in {*top, t}} for row, top, t in rows))


def test_the_lower_bound_grows_with_k_up_to_the_divergence():
    generator = torch.Generator().manual_seed(7)
    p = torch.randn(60, 40, generator=generator) * 2
    q = p + torch.randn(60, 40, generator=generator) * 0.5
    targets = torch.randint(40, (60,), generator=generator)
    exact = compare(FullDistribution(p), FullDistribution(q), targets)
    means = []
    for k in (1, 5, 20, 40):
        bound = compare(top_k_of(p, k, targets), top_k_of(q, k, targets), targets)
        assert bound.kl_is_lower_bound
        assert (bound.kl <= exact.kl + 1e-6).all()
        assert bound.candidate_nll == pytest.approx(exact.candidate_nll, abs=1e-5)
        assert (bound.baseline_top1 == exact.baseline_top1).all()
        means.append(bound.kl.mean())
    assert means == sorted(means)
    assert means[0] < 0.9 * means[-1]
    assert means[-1] == pytest.approx(exact.kl.mean(), rel=1e-4)


def test_directory_against_server_keeps_the_direction_of_the_divergence():
    p, q = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([[0.0, 1.0, 1.0]])
    targets = torch.tensor([2])
    exact = compare(FullDistribution(p), FullDistribution(q), targets)
    left = compare(FullDistribution(p), top_k_of(q, 3, targets), targets)
    right = compare(top_k_of(p, 3, targets), FullDistribution(q), targets)
    reverse = compare(FullDistribution(q), FullDistribution(p), targets)
    assert abs(reverse.kl[0] - exact.kl[0]) > 0.05
    for mixed in (left, right):
        assert mixed.kl[0] == pytest.approx(exact.kl[0], abs=1e-5)
        assert mixed.candidate_nll[0] == pytest.approx(exact.candidate_nll[0], abs=1e-6)
        assert (mixed.baseline_top1[0], mixed.candidate_top1[0]) == (0, 1)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.floats(0.01, 10), st.floats(0.01, 10), st.booleans(), st.booleans()),
        min_size=2,
        max_size=12,
    )
)
def test_any_known_subset_bounds_the_divergence_from_below(tokens):
    p, q = (np.array([row[i] for row in tokens]) for i in (0, 1))
    p, q = p / p.sum(), q / q.sum()
    known_p = {i: math.log(p[i]) for i, row in enumerate(tokens) if row[2]}
    known_q = {i: math.log(q[i]) for i, row in enumerate(tokens) if row[3]}
    bound = kl_lower_bound(known_p, known_q)
    assert 0.0 <= bound <= stats.entropy(p, q) + 1e-9
