"""McNemar's test with the mid-p value.

Under the hypothesis that both models are right equally often, each flip goes either way with
probability one half. The exact test is conservative; the mid-p value counts the outcome that was
seen by half (Fagerland, Lydersen, Laake: "The McNemar test for binary matched-pairs data: mid-p and
asymptotic are better than exact conditional", BMC Medical Research Methodology 13:91, 2013).
"""

from scipy import stats

from taut_deploy.validate.paired.counts import PairedCounts


def mid_p_value(counts: PairedCounts) -> float:
    """Two-sided mid-p value of equal accuracy.

    Args:
        counts: only the flips matter.

    Returns:
        In (0, 1]; 1 without a flip.
    """
    flips = counts.flips
    if flips == 0:
        return 1.0
    fewer = min(counts.baseline_only, counts.candidate_only)
    tail = stats.binom.cdf(fewer, flips, 0.5)
    return float(min(1.0, 2.0 * tail - stats.binom.pmf(fewer, flips, 0.5)))
