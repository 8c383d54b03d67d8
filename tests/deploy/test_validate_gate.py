"""Policies and the gate: what is refused, and the verdict at the edges."""

from __future__ import annotations

import math

import pytest

from taut_deploy.validate import CouldNotValidateError, Metric, Verdict
from taut_deploy.validate.gate import judge
from taut_deploy.validate.policy import builtin_policies, load_policy, parse_policy


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
        policy_of("{mean_kl: {max: 1.0}}"), {"mean_kl": metric(low, high)}, accept_lower_bound=False
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
    verdict, _ = judge(policy, {"top1_agreement": metric(low, high)}, accept_lower_bound=False)
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
    verdict, rules = judge(policy, measured, accept_lower_bound=False)
    assert verdict is expected
    assert [rule.metric for rule in rules] == ["mean_kl", "top1_agreement"]


def test_the_reason_names_the_interval_and_the_margin_its_distance():
    policy = policy_of("{perplexity_ratio: {max: 1.03}}")
    _, (rule,) = judge(policy, {"perplexity_ratio": metric(1.05, 1.07)}, accept_lower_bound=False)
    assert rule.margin == pytest.approx(-0.02)
    assert "[1.05, 1.07]" in rule.reason
    assert "max 1.03" in rule.reason


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
    verdict, (rule,) = judge(policy, measured, accept_lower_bound=accept)
    assert verdict is expected
    assert ("--accept-lower-bound" in rule.reason) == (expected is Verdict.INCONCLUSIVE)


def test_a_lower_bound_cannot_show_that_a_metric_is_too_small():
    measured = {"mean_kl": metric(0.01, 0.02, is_lower_bound=True)}
    verdict, _ = judge(policy_of("{mean_kl: {min: 0.1}}"), measured, accept_lower_bound=False)
    assert verdict is Verdict.INCONCLUSIVE


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
            "require.mean_kl: Value error, give 'max', 'min' or both",
        ),
        ("name: a\nrequire: {mean_kl: {min: 2, max: 1}}", "'min' 2.0 is above 'max' 1.0"),
        ("name: a\nrequire: {}", "require: Value error, give at least one of perplexity_ratio"),
        ("name: a", "require: Field required"),
        ("require: {mean_kl: {max: 0.1}}", "name: Field required"),
        ("name: A b\nrequire: {mean_kl: {max: 0.1}}", "name: "),
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


def test_an_unknown_policy_names_the_shipped_ones(tmp_path):
    with pytest.raises(CouldNotValidateError, match=r"no such policy.*aggressive, .*lossless"):
        load_policy("ballanced")
    with pytest.raises(CouldNotValidateError, match="no such policy"):
        load_policy(tmp_path)


def test_a_binary_policy_file_is_refused(tmp_path):
    (tmp_path / "p.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CouldNotValidateError, match="not a text file"):
        load_policy(tmp_path / "p.yaml")
