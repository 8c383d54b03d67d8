"""Rounded attention states beside exact ones: the comparison, and the table's order."""

from __future__ import annotations

import pytest
import torch
from tiny_models import write_calibration_text, write_llama
from validate_setup import write_text

from taut_deploy.bench.cache_rounding import divergence, main


def test_divergence_is_that_of_the_definition():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    base, other = logits[0].log_softmax(-1), logits[1].log_softmax(-1)
    tokens = torch.tensor([[0, 4, 1, 2]])
    kl = sum(
        float(base[t, v].exp() * (base[t, v] - other[t, v])) for t in range(3) for v in range(5)
    )
    lost = sum(float(base[t, v] - other[t, v]) for t, v in ((0, 4), (1, 1), (2, 2)))
    found = divergence([base], [other], tokens)
    assert found == pytest.approx((kl / 3, torch.tensor(lost / 3).exp().item()), rel=1e-5)


def test_int8_costs_least_and_rounded_queries_cost_more(tmp_path, capsys):
    model = write_llama(tmp_path / "m")
    texts = (
        write_calibration_text(tmp_path / "a.txt"),
        write_text(tmp_path / "b.txt", 400, seed=9),
    )
    main(
        [
            *(str(model), "--calibration", str(texts[0]), "--text", str(texts[1])),
            *("--sequences", "6", "--sequence-length", "32"),
        ]
    )
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    kl = {name: float(value) for name, value, _ in rows}
    assert len(kl) == 6
    assert 0 < kl["cache INT8, token and head"] < kl["cache FP8, tensor"] / 3
    assert kl["cache FP8, tensor"] < kl["cache FP8, tensor; queries FP8 as they are"]
