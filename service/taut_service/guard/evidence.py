"""What the guard knows of one variant: tallies by kind and measure, and the verdict they allow.

A *measure* is a bounded observation of one compared answer. Those with a bound are tested: *harm*
is evidence that a mean lies above its bound, *held* that it lies below. Both may be looked at any
time. Harm is one e-value over all measures and kinds, so ``alpha`` holds for the variant as a
whole: half of its weight lies on all kinds together, where most answers are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from taut_service.config.settings import GuardSettings
from taut_service.guard.behaviour import KINDS
from taut_service.guard.betting import BetLogs, interval, log_mean, mixture
from taut_service.guard.change import BLOCK, BLOCKS, log_risen
from taut_service.guard.sampling import COLDER, SURPRISE_CLIP_NATS, WARMER
from taut_service.guard.tally import Tally, step_of

KL, DISAGREEMENT = "kl", "disagreement"
MUST_HOLD = (KL, DISAGREEMENT)
"""Measures whose bound must be proven before a candidate gets more traffic."""
ALL_KINDS = "all"
TOKENS, ANSWERS = "tokens", "answers"
_MEDIAN = 0.5


def bounds_of(settings: GuardSettings) -> dict[str, float]:
    """Return the bound of the mean of each tested measure."""
    return {
        # In units of the clip, as readings are.
        KL: settings.max_kl_excess_nats / settings.kl_clip_nats,
        DISAGREEMENT: settings.max_disagreement_excess,
        WARMER: settings.max_surprise_excess_nats / SURPRISE_CLIP_NATS,
        COLDER: settings.max_surprise_excess_nats / SURPRISE_CLIP_NATS,
        "loop": settings.max_fault_excess,
        "cut": settings.max_fault_excess,
        "invalid": settings.max_fault_excess,
        "failed": settings.max_error_rate,
        # 1 where the variant took more than max_slowdown times as long: its median may not.
        "slow": _MEDIAN,
    }


def nats_of(settings: GuardSettings) -> dict[str, float]:
    """Return what 1 of a measure is in nats; the others are shares."""
    return {
        KL: settings.kl_clip_nats,
        WARMER: SURPRISE_CLIP_NATS,
        COLDER: SURPRISE_CLIP_NATS,
    }


class Harm(NamedTuple):
    """Evidence of harm.

    Args:
        log_evidence: of the variant as a whole.
        measure: the one that says most.
        kind: where it says so.
    """

    log_evidence: float
    measure: str
    kind: str


@dataclass(frozen=True, slots=True)
class Shown:
    """One measure: its mean beyond the baseline's noise, and where the true mean lies.

    ``low`` and ``high`` hold it at all times at once with probability 1 - alpha. Evidence is given
    as a natural logarithm; it decides from ``ln(1 / alpha)`` on. ``nats`` is what 1 is in nats,
    None of a share.
    """

    mean: float
    low: float
    high: float
    bound: float | None
    answers: int
    log_harm: float
    log_held: float
    nats: float | None = None


class _Measured:
    """What is known of one measure in one kind: its tally, and the bets if it has a bound."""

    def __init__(self, bound: float | None) -> None:
        self.tally = Tally()
        self.bound = bound
        self.above = None if bound is None else BetLogs(bound, +1)
        self.below = None if bound is None else BetLogs(bound, -1)
        self.blocks: dict[int, BetLogs] = {}
        self._kept = (0, 0, 0.0, 0.0)

    def add(self, step: int, times: int) -> None:
        self.tally.merge({step: times})
        if self.above is not None and self.below is not None:
            self.above.add(step, times)
            self.below.add(step, times)

    def add_in_block(self, block: int, step: int, times: int) -> None:
        if self.bound is not None:
            self.blocks.setdefault(block, BetLogs(self.bound, +1)).add(step, times)

    def logs(self, newest: int) -> tuple[float, float]:
        """Return log evidence of harm and of holding, kept until more is known."""
        if self.above is None or self.below is None:
            return 0.0, 0.0
        if self._kept[:2] != (self.tally.size, newest):
            risen = log_risen(self.above, self.blocks, newest)
            self._kept = self.tally.size, newest, risen, mixture(self.below.logs)
        return self._kept[2:]


class Evidence:
    """Counts of every observed value. Adding up is all that it takes to merge two.

    Args:
        bounds: measure → bound, see :func:`bounds_of`.
        counts: ``answers``, ``tokens``, ``kind|measure|step`` → times, and the same by block as
            ``@block|kind|measure|step``.
        nats: measure → what 1 is in nats, see :func:`nats_of`.
    """

    def __init__(
        self,
        bounds: Mapping[str, float],
        counts: Mapping[str, int] | None = None,
        nats: Mapping[str, float] | None = None,
    ) -> None:
        self.bounds = dict(bounds)
        self.nats = dict(nats or {})
        self.counts: Counter[str] = Counter()
        self._measured: dict[tuple[str, str], _Measured] = {}
        self.add_counts(counts or {})

    @property
    def answers(self) -> int:
        """Compared answers."""
        return self.counts[ANSWERS]

    @property
    def tokens(self) -> int:
        """Compared tokens."""
        return self.counts[TOKENS]

    @property
    def block(self) -> int:
        """Number of the block that observations fall into now."""
        return self.answers // BLOCK

    def observe(self, kind: str, values: Mapping[str, float], tokens: int) -> dict[str, int]:
        """Take down one compared answer.

        Args:
            kind: its slice.
            values: measure → observation in [-1, 1].
            tokens: that were compared.

        Returns:
            What was counted, for other holders of the same evidence.
        """
        counted = self.in_block(
            {f"{kind}|{name}|{step_of(value)}": 1 for name, value in values.items()}
        )
        counted |= {ANSWERS: 1, TOKENS: tokens}
        self.add_counts(counted)
        return counted

    def in_block(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Return counts of ``kind|measure|step`` with the same in the block of now."""
        return {**counts, **{f"@{self.block}|{field}": n for field, n in counts.items()}}

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Add what another holder has counted."""
        for field, times in counts.items():
            self.counts[field] += times
            if field in (ANSWERS, TOKENS):
                continue
            *block, kind, measure, step = field.split("|")
            for place in (kind, ALL_KINDS):
                found = self._measured.get((place, measure))
                if found is None:
                    found = _Measured(self.bounds.get(measure))
                    self._measured[place, measure] = found
                if block:
                    found.add_in_block(int(block[0][1:]), int(step), times)
                else:
                    found.add(int(step), times)

    def replace(self, counts: Mapping[str, int]) -> None:
        """Have exactly these counts; quick where they are the old ones and more."""
        more = Counter(counts)
        more.subtract(self.counts)
        if min(more.values(), default=0) < 0:
            self.counts.clear()
            self._measured.clear()
            self.add_counts(counts)
        else:
            self.add_counts(+more)

    def forget_old(self) -> list[str]:
        """Drop the blocks that say nothing any more; return their fields."""
        oldest = self.block - BLOCKS
        old = [f for f in self.counts if f[0] == "@" and int(f[1 : f.index("|")]) < oldest]
        for field in old:
            del self.counts[field]
        for found in self._measured.values():
            for number in [number for number in found.blocks if number < oldest]:
                del found.blocks[number]
        return old

    def tally(self, measure: str, kind: str = ALL_KINDS) -> Tally:
        """Return the tally of a measure."""
        found = self._measured.get((kind, measure))
        return Tally() if found is None else found.tally

    def said(self, measure: str, value: float) -> str:
        """Return a value of a measure for people, with its unit."""
        nats = self.nats.get(measure)
        return f"{value:.4g}" if nats is None else f"{nats * value:.4g} nats"

    def harm(self) -> Harm:
        """Return the evidence that some mean lies above its bound."""
        logs, weights, strongest = [], [], Harm(-math.inf, "", ALL_KINDS)
        for kind in (ALL_KINDS, *KINDS):
            share = 0.5 if kind == ALL_KINDS else 0.5 / len(KINDS)
            for measure in self.bounds:
                log, _ = self._evidence(kind, measure)
                weight = share / len(self.bounds)
                logs.append(log)
                weights.append(weight)
                if log + math.log(weight) > strongest.log_evidence:
                    strongest = Harm(log + math.log(weight), measure, kind)
        return strongest._replace(log_evidence=log_mean(logs, weights))

    def lacking(self, alpha: float) -> list[str]:
        """Return the measures of :data:`MUST_HOLD` that are not proven to keep their bound.

        Each is tested at ``alpha``; all must hold, so the whole claim has that error, too.
        """
        bar = math.log(1.0 / alpha)
        return [name for name in MUST_HOLD if self._evidence(ALL_KINDS, name)[1] < bar]

    def shown(self, alpha: float) -> dict[str, Shown]:
        """Return every measure for people; costs some milliseconds."""
        shown = {}
        for (kind, measure), found in sorted(self._measured.items()):
            if kind == ALL_KINDS:
                tally = found.tally
                low, high = interval(tally, alpha)
                harm, held = found.logs(self.block)
                nats = self.nats.get(measure)
                shown[measure] = Shown(
                    tally.mean, low, high, found.bound, tally.size, harm, held, nats
                )
        return shown

    def _evidence(self, kind: str, measure: str) -> tuple[float, float]:
        found = self._measured.get((kind, measure))
        return (0.0, 0.0) if found is None else found.logs(self.block)
