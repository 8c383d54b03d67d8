"""The gate: limits of a policy against the intervals of the metrics.

A limit is kept (PASS) when the end of the two-sided 95 % interval on the wrong side is inside it,
broken (FAIL) when the whole interval is outside, and otherwise undecided. One broken limit fails
the candidate; without one, a single undecided limit leaves the verdict INCONCLUSIVE. Point
estimates decide nothing. The two-sided interval makes each PASS a one-sided test at 2.5 %, stricter
than the customary 5 %. PASS takes every limit, so that many limits make it no likelier by chance.
Accuracy, tasks, slices and latency are judged alike; the verdict is the worst of all.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from scipy import stats

from taut_deploy.validate.bounds import Bounds
from taut_deploy.validate.metrics import QUANTILES
from taut_deploy.validate.outcome import Metric, RuleOutcome, Verdict
from taut_deploy.validate.policy import ERROR_RATE, LatencyBounds, Policy

_ACCEPT = "--accept-lower-bound"
_MORE_REQUESTS = "raise --latency-requests"
LATENCY = "latency"
# As few independent values all lie on one side of their median with more than 5 %: 2 x 0.5**n.
_QUANTILES_NEED = 6
_POWER = 0.8
_MOST_NARROWED = 30.0  # an interval, by a thousand times the sequences
CLIENT_BUSY_LIMIT = 0.7
"""Share of the time the measuring thread may compute before its own delays count."""


def judge(
    policy: Policy, metrics: Mapping[str, Metric], *, accept_lower_bound: bool, sequences: int
) -> tuple[Verdict, tuple[RuleOutcome, ...]]:
    """Judge every limit on accuracy and combine.

    Args:
        policy: the limits.
        metrics: what was measured, all metrics the policy names among them.
        accept_lower_bound: whether a metric known only as a lower bound may pass a ``max`` limit.
        sequences: that were compared; too few bound no quantile.

    Returns:
        The verdict and one outcome per limit, in the policy's order.
    """
    outcomes = []
    for name, limit in policy.require.limits.items():
        for side, value in limit.sides:
            metric = metrics[name]
            more = more_sequences(value, metric, sequences)
            outcome = judge_limit(name, side, value, metric, accept_lower_bound, more)
            if name in QUANTILES and sequences < _QUANTILES_NEED:
                few = f"{sequences} sequences bound no quantile; use {_QUANTILES_NEED} or more"
                outcome = replace(outcome, verdict=Verdict.INCONCLUSIVE, reason=few)
            outcomes.append(outcome)
    return combine(outcome.verdict for outcome in outcomes), tuple(outcomes)


def more_sequences(limit: float, metric: Metric, sequences: int) -> str:
    """How many sequences decide a limit in 80 % of runs, if the estimate is the truth.

    An interval is as much narrower as the root of their number is larger.

    Args:
        limit: the value.
        metric: what was measured.
        sequences: that were compared.
    """
    distance = abs(limit - metric.estimate)
    half = abs((metric.high if limit > metric.estimate else metric.low) - metric.estimate)
    if distance * _MOST_NARROWED <= half:
        return "the estimate lies at the limit, and no number of sequences decides it"
    z = float(stats.norm.isf(0.025))
    wider = 1 + float(stats.norm.ppf(_POWER)) / z
    needed = math.ceil(sequences * (wider * half / distance) ** 2)
    return f"about {needed:,} sequences decide it in {_POWER:.0%} of runs, if the estimate is right"


def judge_bounds(
    part: str,
    subject: str,
    bounds: Bounds,
    metrics: Mapping[str, Metric],
    *,
    more: str,
    why_not: Mapping[str, str] | None = None,
    accept_lower_bound: bool = False,
) -> tuple[RuleOutcome, ...]:
    """Judge the limits on a task or slice.

    Args:
        part: ``tasks`` or ``slices``.
        subject: name of the task or slice.
        bounds: its section of the policy.
        metrics: what was measured; what could not be is absent and leaves its limit undecided.
        more: what to do where an interval decides nothing.
        why_not: metric to the reason why it is absent; without one the baseline is.
        accept_lower_bound: whether a metric known only as a lower bound may pass a ``max`` limit.
    """
    outcomes = []
    for name, limit in bounds.limits.items():
        for side, value in limit.sides:
            if name in metrics:
                outcome = judge_limit(name, side, value, metrics[name], accept_lower_bound, more)
            else:
                reason = (why_not or {}).get(name, "the baseline gives nothing to compare with")
                why = f"not measured: {reason}"
                outcome = RuleOutcome(name, side, value, Verdict.INCONCLUSIVE, None, why)
            outcomes.append(replace(outcome, part=part, subject=subject))
    return tuple(outcomes)


def unmeasured_bounds(part: str, subject: str, bounds: Bounds, why: str) -> tuple[RuleOutcome, ...]:
    """Every limit on a required task or slice that was not measured, as undecided."""
    if not bounds.required:
        return ()
    return tuple(
        RuleOutcome(
            name,
            side,
            value,
            Verdict.INCONCLUSIVE,
            None,
            f"not measured: {why}",
            part=part,
            subject=subject,
        )
        for name, limit in bounds.limits.items()
        for side, value in limit.sides
    )


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """FAIL before INCONCLUSIVE before PASS; PASS for none."""
    found = set(verdicts)
    for decisive in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        if decisive in found:
            return decisive
    return Verdict.PASS


def judge_latency(
    bounds: LatencyBounds,
    ratios: Mapping[int, Mapping[str, Metric]],
    error_rate: Metric,
    client_busy: Mapping[int, float],
) -> tuple[RuleOutcome, ...]:
    """Judge every latency bound at every concurrency, and the error rate once.

    Args:
        bounds: the policy's section.
        ratios: planned concurrency → metrics by name; what could not be measured is absent.
        error_rate: failed share of the candidate's requests, all concurrencies together.
        client_busy: concurrency → share of the time the measuring thread computed.

    Returns:
        One outcome per bound and concurrency.
    """
    outcomes = []
    for name, side, limit in bounds.limits:
        if name == ERROR_RATE:
            outcome = judge_limit(name, side, limit, error_rate, False, _MORE_REQUESTS)
            outcomes.append(replace(outcome, part=LATENCY))
            continue
        for concurrency, metrics in ratios.items():
            outcome = _judge_ratio(name, side, limit, metrics, client_busy.get(concurrency, 0.0))
            outcomes.append(replace(outcome, concurrency=concurrency, part=LATENCY))
    return tuple(outcomes)


def unmeasured_latency(bounds: LatencyBounds, why: str) -> tuple[RuleOutcome, ...]:
    """Every bound as undecided, for a policy that requires a measurement that was not made."""
    reason = f"not measured: {why}"
    return tuple(
        RuleOutcome(name, side, limit, Verdict.INCONCLUSIVE, None, reason, part=LATENCY)
        for name, side, limit in bounds.limits
    )


def _judge_ratio(
    name: str, side: str, limit: float, metrics: Mapping[str, Metric], busy: float
) -> RuleOutcome:
    if name not in metrics:
        why = "not measured: too few blocks in which both models answered"
        return RuleOutcome(name, side, limit, Verdict.INCONCLUSIVE, None, why)
    outcome = judge_limit(name, side, limit, metrics[name], False, _MORE_REQUESTS)
    if outcome.verdict is Verdict.PASS and busy > CLIENT_BUSY_LIMIT:
        why = (
            f"the measuring client computed {busy:.0%} of the time: its own delays hide "
            "differences; lower --latency-concurrency"
        )
        return replace(outcome, verdict=Verdict.INCONCLUSIVE, reason=why)
    return outcome


def judge_limit(
    name: str,
    side: str,
    limit: float,
    metric: Metric,
    accept_lower_bound: bool,
    more: str = "use more sequences",
) -> RuleOutcome:
    """Judge one limit.

    Args:
        name: of the metric.
        side: ``max`` or ``min``.
        limit: the value.
        metric: what was measured.
        accept_lower_bound: whether a metric known only as a lower bound may pass a ``max`` limit.
        more: what to do where the interval decides nothing.
    """
    # Distance to the limit, positive inside, of the interval's worst and best end.
    if side == "max":
        worst, best, bound = limit - metric.high, limit - metric.low, metric.high
    else:
        worst, best, bound = metric.low - limit, metric.high - limit, metric.low
    interval = f"[{metric.low:.6g}, {metric.high:.6g}]"
    if worst >= 0:
        verdict, margin = Verdict.PASS, worst
        reason = f"the interval's end {bound:.6g} keeps {side} {limit:g}"
    elif best < 0:
        verdict, margin = Verdict.FAIL, best
        reason = f"the whole interval {interval} is outside {side} {limit:g}"
    else:
        verdict, margin = Verdict.INCONCLUSIVE, worst
        reason = f"the interval {interval} contains the limit {side} {limit:g}; {more}"
    unproven = Verdict.PASS if side == "max" else Verdict.FAIL
    if metric.is_lower_bound and verdict is unproven and not accept_lower_bound:
        verdict = Verdict.INCONCLUSIVE
        reason = (
            "only a lower bound is known, which cannot show this; compare directories or give "
            + _ACCEPT
        )
    return RuleOutcome(name, side, limit, verdict, margin, reason)
