"""Learning rate and order of sequences are functions of the step."""

from __future__ import annotations

import torch

from taut_deploy.compress.train.schedule import rate_at, rows_at


def test_rate_rises_then_falls_to_its_share():
    rates = [rate_at(step, 100, 0.1, 0.05) for step in range(100)]
    assert rates[:10] == sorted(rates[:10]) and 0 < rates[0] < 0.15
    assert rates[10] == 1.0 and rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.05 < rates[-1] < 0.06


def test_every_sequence_comes_once_a_turn_in_changing_order():
    rows = torch.cat([rows_at(step, 4, 10, seed=3) for step in range(5)])
    first, second = rows[:10].tolist(), rows[10:].tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert torch.equal(rows_at(2, 4, 10, seed=3), rows[8:12])
    assert not torch.equal(rows_at(0, 10, 10, seed=4), rows_at(0, 10, 10, seed=3))
