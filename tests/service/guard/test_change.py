"""Harm that begins late is seen, and the false alarms stay what they were."""

from __future__ import annotations

import math

import numpy as np
import pytest

from taut_service.guard.betting import SHARES, WEIGHTS, BetLogs, log_above
from taut_service.guard.change import BLOCK, BLOCKS, log_risen
from taut_service.guard.evidence import Evidence
from taut_service.guard.tally import Tally

BOUND, ALPHA = 0.04, 0.05
BAR = math.log(1 / ALPHA)


def test_false_alarms_of_the_mixture_over_all_times_of_change_stay_below_alpha() -> None:
    """With every beginning kept: giving some up only makes evidence weaker."""
    rng, runs, blocks = np.random.default_rng(5), 10_000, 12
    bets = np.array(SHARES) / (1 + BOUND)
    whole = np.zeros((runs, len(bets)))
    starts = np.zeros((runs, blocks, len(bets)))
    worst = np.zeros(runs)
    begun = 0.5 / ((np.arange(blocks) + 1) * (np.arange(blocks) + 2))
    for answer in range(blocks * BLOCK):
        block = answer // BLOCK
        # Hard: as often ruinous as allowed.
        gain = np.where(rng.random(runs) < (1 + BOUND) / 2, 1.0, -1.0) - BOUND
        step = np.log1p(gain[:, None] * bets)
        whole += step
        starts[:, : block + 1] += step[:, None]
        capital = 0.5 * (np.exp(whole) @ np.array(WEIGHTS))
        each = np.exp(starts[:, : block + 1]) @ np.array(WEIGHTS)
        capital += each @ begun[: block + 1] + 0.5 / (block + 2)
        worst = np.maximum(worst, capital)
    share = float((worst >= 1 / ALPHA).mean())
    print(f"{share:.4f} false alarms in {runs} runs of {blocks * BLOCK}")
    assert share <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / runs)


def test_the_mixture_is_that_of_its_definition() -> None:
    rng = np.random.default_rng(1)
    values = rng.uniform(-0.3, 0.5, 3 * BLOCK + 7).round(3)
    whole, bets, blocks = Tally(), BetLogs(BOUND), {}
    for number, value in enumerate(values):
        step = whole.add(float(value))
        bets.add(step, 1)
        blocks.setdefault(number // BLOCK, BetLogs(BOUND)).add(step, 1)
    expected = 0.5 * math.exp(log_above(whole, BOUND)) + 0.5 / 5
    for start in range(4):
        since = Tally()
        for value in values[start * BLOCK :]:
            since.add(float(value))
        expected += 0.5 / ((start + 1) * (start + 2)) * math.exp(log_above(since, BOUND))
    assert log_risen(bets, blocks, 3) == pytest.approx(math.log(expected))


def test_replacing_counts_by_more_or_by_others_is_as_beginning_with_them() -> None:
    evidence = Evidence({"kl": BOUND, "slow": 0.5})
    for value in (0.1, -0.2, 0.3):
        evidence.observe("chat", {"kl": value, "slow": 1.0}, 5)
    before = dict(evidence.counts)
    evidence.observe("json", {"kl": 0.5}, 5)
    for counts in (dict(evidence.counts), before, {}):
        again = Evidence({"kl": BOUND, "slow": 0.5}, before)
        again.replace(counts)
        fresh = Evidence({"kl": BOUND, "slow": 0.5}, counts)
        assert dict(again.counts) == counts
        assert again.shown(0.05) == fresh.shown(0.05)
        assert again.harm().log_evidence == pytest.approx(fresh.harm().log_evidence)


@pytest.mark.parametrize("good", [0, 1_000, 20_000])
def test_the_median_delay_of_harm_that_begins_late(good: int) -> None:
    delays = []
    for seed in range(21):
        rng = np.random.default_rng(seed)
        evidence = Evidence({"kl": BOUND})
        evidence.add_counts({"answers": good, "chat|kl|2": good})
        for number in range(max(0, good - BLOCKS * BLOCK), good, BLOCK):
            evidence.add_counts({f"@{number // BLOCK}|chat|kl|2": BLOCK})
        for delay in range(1, 400):  # noqa: B007
            evidence.observe("chat", {"kl": float(rng.normal(0.3, 0.1))}, 10)
            if evidence.harm().log_evidence >= BAR:
                break
        delays.append(delay)
    median = sorted(delays)[10]
    print(f"median delay after {good} good answers: {median}")
    # 2 ln of the blocks, and at most a block until the next beginning.
    assert median <= 60 + BLOCK * bool(good) + 2 * 2 * math.log(1 + good / BLOCK) / 0.2


def test_old_blocks_are_forgotten_and_the_whole_is_kept() -> None:
    evidence = Evidence({"kl": BOUND})
    for _ in range((BLOCKS + 5) * BLOCK):
        evidence.observe("chat", {"kl": 0.0}, 1)
    old = evidence.forget_old()
    assert {int(field[1:].split("|")[0]) for field in old} == set(range(5))
    assert evidence.tally("kl").size == (BLOCKS + 5) * BLOCK
    again = Evidence({"kl": BOUND}, evidence.counts).harm().log_evidence
    assert again == pytest.approx(evidence.harm().log_evidence)
