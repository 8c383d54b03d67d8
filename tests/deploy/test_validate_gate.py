"""Policies and the gate: what is refused, and the verdict at the edges."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from scipy import stats

from taut_deploy.validate import CouldNotValidateError, Metric, Verdict
from taut_deploy.validate.bootstrap import mean_interval, resample_indices
from taut_deploy.validate.gate import (
    CLIENT_BUSY_LIMIT,
    combine,
    judge,
    judge_latency,
    unmeasured_latency,
)
from taut_deploy.validate.policy import (
    LatencyBounds,
    builtin_policies,
    load_policy,
    parse_policy,
)


def metric(low: float, high: float, *, is_lower_bound: bool = False) -> Metric:
    middle = (low + high) / 2
    return Metric(middle, low, high, low, high, is_lower_bound=is_lower_bound)


def policy_of(text: str):
    return parse_policy(f"name: test\nrequire: {text}", "p.yaml")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.9, 1.0, Verdict.PASS),
        (1.0, 1.0, Verdict.PASS),
        (0.9, math.nextafter(1.0, 2.0), Verdict.INCONCLUSIVE),
        (1.0, 1.1, Verdict.INCONCLUSIVE),
        (math.nextafter(1.0, 2.0), 1.1, Verdict.FAIL),
    ],
)
def test_upper_limit_at_its_edges(low, high, expected):
    verdict, (rule,) = judge(
        policy_of("{mean_kl: {max: 1.0}}"),
        {"mean_kl": metric(low, high)},
        accept_lower_bound=False,
        sequences=32,
    )
    assert (verdict, rule.verdict) == (expected, expected)
    assert (rule.margin >= 0) == (expected is Verdict.PASS)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.9, 0.95, Verdict.PASS),
        (math.nextafter(0.9, 0.0), 0.95, Verdict.INCONCLUSIVE),
        (0.8, 0.9, Verdict.INCONCLUSIVE),
        (0.8, math.nextafter(0.9, 0.0), Verdict.FAIL),
    ],
)
def test_lower_limit_at_its_edges(low, high, expected):
    policy = policy_of("{top1_agreement: {min: 0.9}}")
    verdict, _ = judge(
        policy, {"top1_agreement": metric(low, high)}, accept_lower_bound=False, sequences=32
    )
    assert verdict is expected


@pytest.mark.parametrize(
    ("kl", "agreement", "expected"),
    [
        ((0.0, 0.01), (0.95, 1.0), Verdict.PASS),
        ((0.0, 0.01), (0.85, 1.0), Verdict.INCONCLUSIVE),
        ((0.2, 0.3), (0.85, 1.0), Verdict.FAIL),
        ((0.2, 0.3), (0.95, 1.0), Verdict.FAIL),
    ],
)
def test_a_broken_limit_outranks_an_undecided_one(kl, agreement, expected):
    policy = policy_of("{mean_kl: {max: 0.1}, top1_agreement: {min: 0.9}}")
    measured = {"mean_kl": metric(*kl), "top1_agreement": metric(*agreement)}
    verdict, rules = judge(policy, measured, accept_lower_bound=False, sequences=32)
    assert verdict is expected
    assert [rule.metric for rule in rules] == ["mean_kl", "top1_agreement"]


def test_the_reason_names_the_interval_and_the_margin_its_distance():
    policy = policy_of("{perplexity_ratio: {max: 1.03}}")
    _, (rule,) = judge(
        policy, {"perplexity_ratio": metric(1.05, 1.07)}, accept_lower_bound=False, sequences=32
    )
    assert rule.margin == pytest.approx(-0.02)
    assert "[1.05, 1.07]" in rule.reason
    assert "max 1.03" in rule.reason


def test_an_undecided_limit_names_the_sequences_that_decide_it_in_80_percent_of_runs():
    """Checked by drawing so many, again and again, from what was estimated."""
    policy, first = policy_of("{mean_kl: {max: 1.2}}"), 32
    half = float(stats.t.isf(0.025, first - 1)) / math.sqrt(first)  # of values that spread by 1
    measured = {"mean_kl": metric(1.0 - half, 1.0 + half)}
    verdict, (rule,) = judge(policy, measured, accept_lower_bound=False, sequences=first)
    assert verdict is Verdict.INCONCLUSIVE
    needed = int(re.search(r"about ([\d,]+) sequences", rule.reason)[1].replace(",", ""))
    rng, runs, passed = np.random.default_rng(1), 400, 0
    for run in range(runs):
        drawn = mean_interval(rng.normal(1.0, 1.0, needed), resample_indices(needed, 200, run))
        passed += drawn.high <= 1.2
    assert 0.74 <= passed / runs <= 0.86, needed


def test_an_estimate_at_its_limit_is_not_promised_to_be_decided():
    measured = {"mean_kl": metric(0.9, 1.1)}
    policy = policy_of("{mean_kl: {max: 1.001}}")
    _, (rule,) = judge(policy, measured, accept_lower_bound=False, sequences=32)
    assert rule.reason.endswith("no number of sequences decides it")


@pytest.mark.parametrize(
    ("high", "accept", "expected"),
    [
        (0.05, False, Verdict.INCONCLUSIVE),
        (0.05, True, Verdict.PASS),
        (0.30, True, Verdict.FAIL),
        (0.30, False, Verdict.FAIL),
    ],
)
def test_a_lower_bound_can_fail_a_candidate_but_passes_it_only_on_request(high, accept, expected):
    measured = {"mean_kl": metric(high - 0.01, high, is_lower_bound=True)}
    policy = policy_of("{mean_kl: {max: 0.1}}")
    verdict, (rule,) = judge(policy, measured, accept_lower_bound=accept, sequences=32)
    assert verdict is expected
    assert ("--accept-lower-bound" in rule.reason) == (expected is Verdict.INCONCLUSIVE)


def test_a_lower_bound_cannot_show_that_a_metric_is_too_small():
    measured = {"mean_kl": metric(0.01, 0.02, is_lower_bound=True)}
    verdict, _ = judge(
        policy_of("{mean_kl: {min: 0.1}}"), measured, accept_lower_bound=False, sequences=32
    )
    assert verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(("sequences", "expected"), [(5, "INCONCLUSIVE"), (6, "PASS")])
def test_too_few_sequences_bound_no_quantile(sequences, expected):
    policy = policy_of("{kl_p90: {max: 0.2}}")
    measured = {"kl_p90": metric(0.1, 0.15)}
    verdict, (rule,) = judge(policy, measured, accept_lower_bound=False, sequences=sequences)
    assert verdict.value == expected
    assert sequences == 6 or rule.reason == "5 sequences bound no quantile; use 6 or more"


def test_exit_codes():
    assert [verdict.exit_code for verdict in Verdict] == [0, 1, 2]
    assert CouldNotValidateError.exit_code == 3


@pytest.mark.parametrize("size", ["", "-small-model"])
def test_shipped_policies_load_and_get_looser_in_order(size):
    tiers = [
        load_policy(f"{tier}{size}").require for tier in ("lossless", "balanced", "aggressive")
    ]
    for name in ("perplexity_ratio", "mean_kl"):
        limits = [tier.limits[name].max for tier in tiers]
        assert limits == sorted(set(limits))
    floors = [tier.limits["top1_agreement"].min for tier in tiers]
    assert floors == sorted(set(floors), reverse=True)


def test_every_shipped_policy_is_named_after_its_file():
    assert len(builtin_policies()) == 6
    assert [load_policy(name).name for name in builtin_policies()] == builtin_policies()


def test_shipped_policies_bound_latency_where_it_is_measured():
    for name in builtin_policies():
        latency = load_policy(name).latency
        assert latency is not None
        assert not latency.required, "directories must stay comparable"
        bounds = {metric for metric, _, _ in latency.limits}
        assert {"ttft_p50_ratio", "itl_p50_ratio", "throughput_ratio", "error_rate"} == bounds
        # A candidate that is exactly as fast as the baseline keeps every bound.
        assert all(
            limit > 1 if side == "max" else limit < 1 for _, side, limit in latency.limits[:3]
        )


def judged(bounds: LatencyBounds, ratios, error=(0.0, 0.01), busy=0.1):
    rates = dict.fromkeys(ratios, busy)
    return judge_latency(bounds, ratios, metric(*error), rates)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.9, 1.1, Verdict.PASS),
        (0.9, math.nextafter(1.1, 2.0), Verdict.INCONCLUSIVE),
        (1.1, 1.2, Verdict.INCONCLUSIVE),
        (math.nextafter(1.1, 2.0), 1.2, Verdict.FAIL),
    ],
)
def test_latency_is_judged_like_accuracy(low, high, expected):
    rule, _ = judged(
        LatencyBounds(itl_p50_ratio_at_most=1.1), {1: {"itl_p50_ratio": metric(low, high)}}
    )
    assert (rule.metric, rule.side, rule.limit) == ("itl_p50_ratio", "max", 1.1)
    assert (rule.part, rule.concurrency, rule.verdict) == ("latency", 1, expected)
    assert ("--latency-requests" in rule.reason) == (expected is Verdict.INCONCLUSIVE)


def test_throughput_has_a_lower_limit_and_every_concurrency_counts():
    bounds = LatencyBounds(throughput_ratio_at_least=0.9)
    ratios = {c: {"throughput_ratio": metric(low, low + 0.05)} for c, low in ((1, 0.95), (8, 0.5))}
    outcomes = judged(bounds, ratios)
    assert [(rule.concurrency, rule.verdict) for rule in outcomes] == [
        (1, Verdict.PASS),
        (8, Verdict.FAIL),
        (None, Verdict.PASS),
    ]
    assert combine(rule.verdict for rule in outcomes) is Verdict.FAIL


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ((0.0, 0.05), Verdict.PASS),
        ((0.0, 0.051), Verdict.INCONCLUSIVE),
        ((0.051, 0.2), Verdict.FAIL),
    ],
)
def test_the_error_rate_is_judged_once_though_no_bound_was_given(error, expected):
    ratios = {c: {"itl_p50_ratio": metric(0.9, 1.0)} for c in (1, 8)}
    *_, rule = judged(LatencyBounds(itl_p50_ratio_at_most=1.1), ratios, error)
    assert (rule.metric, rule.limit, rule.concurrency) == ("error_rate", 0.05, None)
    assert rule.verdict is expected


def test_a_ratio_that_is_absent_is_undecided():
    rule, _ = judged(LatencyBounds(itl_p50_ratio_at_most=1.1), {1: {}})
    assert (rule.verdict, rule.margin) == (Verdict.INCONCLUSIVE, None)
    assert "not measured" in rule.reason


@pytest.mark.parametrize(
    ("ratio", "busy", "expected"),
    [
        ((0.9, 1.0), CLIENT_BUSY_LIMIT, Verdict.PASS),
        ((0.9, 1.0), CLIENT_BUSY_LIMIT + 0.01, Verdict.INCONCLUSIVE),
        ((1.2, 1.3), CLIENT_BUSY_LIMIT + 0.01, Verdict.FAIL),
    ],
)
def test_a_busy_client_passes_nobody(ratio, busy, expected):
    """What it adds to both sides draws the ratio towards one: a FAIL stands, a PASS does not."""
    bounds = LatencyBounds(itl_p50_ratio_at_most=1.1)
    rule, errors = judged(bounds, {8: {"itl_p50_ratio": metric(*ratio)}}, busy=busy)
    assert rule.verdict is expected
    assert errors.verdict is Verdict.PASS


def test_a_required_measurement_that_was_not_made_is_undecided_bound_by_bound():
    outcomes = unmeasured_latency(LatencyBounds(itl_p50_ratio_at_most=1.1), "no servers")
    assert [(rule.metric, rule.verdict) for rule in outcomes] == [
        ("itl_p50_ratio", Verdict.INCONCLUSIVE),
        ("error_rate", Verdict.INCONCLUSIVE),
    ]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([], Verdict.PASS),
        ([Verdict.PASS, Verdict.INCONCLUSIVE], Verdict.INCONCLUSIVE),
        ([Verdict.INCONCLUSIVE, Verdict.FAIL, Verdict.PASS], Verdict.FAIL),
    ],
)
def test_the_worst_verdict_decides(verdicts, expected):
    assert combine(verdicts) is expected


GOOD = "name: a\nrequire: {mean_kl: {max: 0.1}}"


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        (GOOD + "\nstrict: true", "p.yaml: strict: unknown key"),
        ("name: a\nrequire: {mean_kld: {max: 0.1}}", "require.mean_kld: unknown key"),
        ("name: a\nrequire: {mean_kl: {maximum: 0.1}}", "require.mean_kl.maximum: unknown key"),
        ("name: a\nrequire: {mean_kl: {max: '0.1'}}", "require.mean_kl.max: "),
        ("name: a\nrequire: {mean_kl: {max: .nan}}", "require.mean_kl.max: "),
        ("name: a\nrequire: {mean_kl: {max: .inf}}", "require.mean_kl.max: "),
        ("name: a\nrequire: {mean_kl: {max: true}}", "require.mean_kl.max: "),
        (
            "name: a\nrequire: {mean_kl: {}}",
            "require.mean_kl: give 'max', 'min' or both",
        ),
        (
            "name: a\nrequire: {top1_agreement: {min: 91.5}}",
            "top1_agreement.min: 91.5, and the metric is from 0 to 1; 91.5 % is 0.915",
        ),
        (
            "name: a\nrequire: {mean_kl: {max: -0.01}}",
            "mean_kl.max: -0.01, and the metric is at least 0",
        ),
        ("name: a\nrequire: {kl_p99: {min: -1}}", "kl_p99.min: -1, and the metric is at least 0"),
        ("name: a\nrequire: {perplexity_ratio: {max: -1}}", "perplexity_ratio.max: -1, and the"),
        (
            "name: a\nrequire: {rms_delta_p: {max: 12}}",
            "rms_delta_p.max: 12, and the metric is from 0 to 1; 12 % is 0.12",
        ),
        ("name: a\nrequire: {mean_kl: {min: 2, max: 1}}", "'min' 2.0 is above 'max' 1.0"),
        ("name: a\nrequire: {}", "require: give at least one of perplexity_ratio"),
        ("name: a", "require: Field required"),
        (
            "name: a\nrequre: {mean_kl: {max: 0.1}}",
            "p.yaml: requre: unknown key; did you mean 'require'?",
        ),
        ("require: {mean_kl: {max: 0.1}}", "name: Field required"),
        ("name: A b\nrequire: {mean_kl: {max: 0.1}}", "name: "),
        (
            GOOD + "\nlatency: {}",
            "latency: give at least one of ttft_p50_ratio_at_most",
        ),
        (GOOD + "\nlatency: {required: true}", "latency: give at least one of"),
        (GOOD + "\nlatency: {itl_p50_ratio_at_most: null}", "latency: give at least"),
        (GOOD + "\nlatency: 1.1", "latency: "),
        (GOOD + "\nlatency: {itl_p50_at_most: 1.1}", "latency.itl_p50_at_most: unknown key"),
        (GOOD + "\nlatency: {itl_p50_ratio_at_least: 1}", "itl_p50_ratio_at_least: unknown key"),
        (GOOD + "\nlatency: {itl_p50_ratio_at_most: -1.0}", "latency.itl_p50_ratio_at_most: "),
        (GOOD + "\nlatency: {itl_p50_ratio_at_most: 0}", "latency.itl_p50_ratio_at_most: "),
        (GOOD + "\nlatency: {itl_p50_ratio_at_most: '1.1'}", "latency.itl_p50_ratio_at_most: "),
        (GOOD + "\nlatency: {throughput_ratio_at_least: .nan}", "throughput_ratio_at_least: "),
        (GOOD + "\nlatency: {ttft_p95_ratio_at_most: .inf}", "latency.ttft_p95_ratio_at_most: "),
        (GOOD + "\nlatency: {error_rate_at_most: 1.0}", "latency.error_rate_at_most: "),
        (GOOD + "\nlatency: {error_rate_at_most: -0.1}", "latency.error_rate_at_most: "),
        (GOOD + "\nlatency: {error_rate_at_most: 0.1, required: 1}", "latency.required: "),
        (GOOD + "\nlatency: {error_rate_at_most: 0.1, required: 'yes'}", "latency.required: "),
        ("- 1", "expected a mapping with 'name' and 'require'"),
        ("", "expected a mapping"),
        ("name: [", "not valid YAML"),
    ],
)
def test_wrong_policies_are_refused_by_key(text, fragment):
    with pytest.raises(CouldNotValidateError) as caught:
        parse_policy(text, "p.yaml")
    message = str(caught.value)
    assert message.startswith("p.yaml: ")
    assert fragment in message
    assert "\n" not in message


def test_a_policy_is_read_from_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)
    assert load_policy(file).require.limits["mean_kl"].max == 0.1


def test_latency_bounds_are_read_with_their_defaults():
    text = GOOD + "\nlatency: {itl_p95_ratio_at_most: 2, throughput_ratio_at_least: 0.5}"
    latency = parse_policy(text, "p.yaml").latency
    assert latency is not None
    assert latency.required
    assert latency.limits == [
        ("itl_p95_ratio", "max", 2.0),
        ("throughput_ratio", "min", 0.5),
        ("error_rate", "max", 0.05),
    ]
    only_errors = parse_policy(GOOD + "\nlatency: {error_rate_at_most: 0}", "p.yaml").latency
    assert only_errors is not None
    assert only_errors.limits == [("error_rate", "max", 0.0)]


def test_an_unknown_policy_names_the_shipped_ones(tmp_path):
    with pytest.raises(CouldNotValidateError, match=r"no such policy.*aggressive, .*lossless"):
        load_policy("ballanced")
    with pytest.raises(CouldNotValidateError, match="no such policy"):
        load_policy(tmp_path)


def test_a_binary_policy_file_is_refused(tmp_path):
    (tmp_path / "p.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CouldNotValidateError, match="not a text file"):
        load_policy(tmp_path / "p.yaml")
