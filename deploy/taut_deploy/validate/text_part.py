"""The text of a validation: scored until every limit is decided, or all of it was used."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from scipy import stats

from taut_deploy.validate import metrics
from taut_deploy.validate.divergence import Comparison
from taut_deploy.validate.gate import combine, judge
from taut_deploy.validate.job import ValidationJob
from taut_deploy.validate.metrics import QUANTILES
from taut_deploy.validate.outcome import Metric, RuleOutcome, Verdict
from taut_deploy.validate.paired.spending import boundaries, looks
from taut_deploy.validate.partial import Partial
from taut_deploy.validate.policy import Policy
from taut_deploy.validate.side_by_side import Source, compare_sources
from taut_deploy.validate.text import TokenizedText

_IN_TAIL = 5  # resamples beyond an end, that the end be known


@dataclass(frozen=True, slots=True)
class TextCompared:
    """Both models over the text, as far as it was needed.

    Args:
        comparison: arrays [sequences, positions].
        looks: numbers of sequences at which the limits were judged.
        alpha: one minus the confidence of the last look's intervals.
    """

    comparison: Comparison
    looks: tuple[int, ...]
    alpha: float

    def judged(
        self, job: ValidationJob, policy: Policy, noise: Comparison | None
    ) -> tuple[Mapping[str, Metric], Verdict, tuple[RuleOutcome, ...]]:
        """Metrics with intervals of this look, the verdict, and the limits against them.

        Args:
            job: the validation.
            policy: the limits.
            noise: the baseline against itself, for the noise floor.
        """
        measured = metrics.measure(
            self.comparison,
            noise,
            resamples=job.sampling.bootstrap,
            seed=job.sampling.seed,
            alpha=self.alpha,
        )
        verdict, rules = judge(
            policy,
            measured,
            accept_lower_bound=job.accept_lower_bound,
            sequences=len(self.comparison.kl),
        )
        if self.alpha / 2 * job.sampling.bootstrap < _IN_TAIL:
            rules = tuple(map(_unresolved, rules))
            verdict = combine(rule.verdict for rule in rules)
        return measured, verdict, rules


def _unresolved(rule: RuleOutcome) -> RuleOutcome:
    """A limit on a quantile: at so small an error Student's interval is all that is left.

    For shares as skewed as those above a quantile it is too narrow.
    """
    if rule.metric not in QUANTILES:
        return rule
    why = "this look's interval ends where there are too few resamples; raise --bootstrap"
    return replace(rule, verdict=Verdict.INCONCLUSIVE, reason=why)


def compare_text(
    job: ValidationJob,
    policy: Policy,
    text: TokenizedText,
    models: tuple[Source, Source],
    partial: Partial,
) -> TextCompared:
    """Score sequences with both models, more of them while a limit is undecided.

    Args:
        job: says how many sequences first, and how many at most.
        policy: the limits.
        text: as many sequences as may be used.
        models: baseline and candidate.
        partial: is told of every sequence.

    Raises:
        CouldNotValidateError: a model cannot answer, or their vocabularies differ.
    """
    sizes = looks(job.sampling.sequences, len(text.sequences))
    parts: list[Comparison] = []
    done = 0
    for at, (size, z) in enumerate(zip(sizes, boundaries(sizes), strict=True), start=1):
        rows = list(text.sequences[done:size])
        part = compare_sources(
            *models, rows, "compare", job.progress, partial.sequence, partial.once, done
        )
        parts.append(part)
        done = size
        found = TextCompared(metrics.joined(parts), sizes[:at], float(2 * stats.norm.sf(z)))
        if size == sizes[-1] or found.judged(job, policy, None)[1] is not Verdict.INCONCLUSIVE:
            break
    return found
