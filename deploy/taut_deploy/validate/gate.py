"""The gate: limits of a policy against the intervals of the metrics.

A limit is kept (PASS) when the end of the two-sided 95 % interval on the wrong side is inside it,
broken (FAIL) when the whole interval is outside, and otherwise undecided. One broken limit fails
the candidate; without one, a single undecided limit leaves the verdict INCONCLUSIVE. Point
estimates decide nothing. The two-sided interval makes each PASS a one-sided test at 2.5 %, stricter
than the customary 5 %.
"""

from collections.abc import Mapping

from taut_deploy.validate.job import Metric, RuleOutcome, Verdict
from taut_deploy.validate.policy import Policy

_ACCEPT = "--accept-lower-bound"


def judge(
    policy: Policy, metrics: Mapping[str, Metric], *, accept_lower_bound: bool
) -> tuple[Verdict, tuple[RuleOutcome, ...]]:
    """Judge every limit and combine.

    Args:
        policy: the limits.
        metrics: what was measured, all metrics the policy names among them.
        accept_lower_bound: whether a metric known only as a lower bound may pass a ``max`` limit.

    Returns:
        The verdict and one outcome per limit, in the policy's order.
    """
    outcomes = []
    for name, limit in policy.require.limits.items():
        for side, value in (("max", limit.max), ("min", limit.min)):
            if value is not None:
                outcomes.append(_judge_limit(name, side, value, metrics[name], accept_lower_bound))
    verdicts = [outcome.verdict for outcome in outcomes]
    for decisive in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        if decisive in verdicts:
            return decisive, tuple(outcomes)
    return Verdict.PASS, tuple(outcomes)


def _judge_limit(
    name: str, side: str, limit: float, metric: Metric, accept_lower_bound: bool
) -> RuleOutcome:
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
        reason = f"the interval {interval} contains the limit {side} {limit:g}; use more sequences"
    unproven = Verdict.PASS if side == "max" else Verdict.FAIL
    if metric.is_lower_bound and verdict is unproven and not accept_lower_bound:
        verdict = Verdict.INCONCLUSIVE
        reason = (
            "only a lower bound is known, which cannot show this; compare directories or give "
            + _ACCEPT
        )
    return RuleOutcome(name, side, limit, verdict, margin, reason)
