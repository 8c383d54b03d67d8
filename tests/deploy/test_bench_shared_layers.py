"""Weights shared by neighbouring layers: least squares by brute force, and both tables."""

from __future__ import annotations

import pytest
import torch
from tiny_models import write_calibration_text, write_llama
from validate_setup import write_text

from taut_deploy.bench.shared_layers import Layers, main, relative_error, share_basis, tie


def inputs_and_weights():
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(8, 8, generator=generator)
    inputs = [torch.randn(200, 8, generator=generator) @ (mix + k) for k in range(2)]
    weights = [torch.randn(6, 8, generator=generator) for _ in range(2)]
    return inputs, weights, [x.T @ x for x in inputs]


def test_the_error_is_that_of_the_outputs():
    (x, _), (weight, other), (gram, _) = inputs_and_weights()
    expected = (x @ (other - weight).T).square().sum() / (x @ weight.T).square().sum()
    assert relative_error(weight, other, gram) == pytest.approx(float(expected), rel=1e-4)


def test_no_other_matrix_serves_both_layers_better():
    inputs, weights, grams = inputs_and_weights()
    one = tie(weights, grams)
    sizes = [(x @ w.T).norm() for x, w in zip(inputs, weights, strict=True)]
    stacked = torch.cat([x / size for x, size in zip(inputs, sizes, strict=True)])
    wanted = torch.cat([x @ w.T / s for x, w, s in zip(inputs, weights, sizes, strict=True)])
    exact = torch.linalg.lstsq(stacked, wanted).solution.T

    def cost(value):
        return float((stacked @ value.T - wanted).square().sum())

    assert cost(exact) <= cost(one) <= 1.01 * cost(exact)
    assert cost(one) < cost((weights[0] + weights[1]) / 2)


def test_equal_weights_are_shared_without_loss():
    _, (weight, _), grams = inputs_and_weights()
    torch.testing.assert_close(tie([weight, weight], grams), weight, rtol=1e-4, atol=1e-4)
    # Both of rank 2 in one space of inputs, which a basis of rank 2 spans.
    left = torch.randn(2, 6, 2)
    right = torch.randn(2, 8)
    shared = share_basis([left[0] @ right, left[1] @ right], grams, 0.45)
    for value, part in zip(shared, left, strict=True):
        torch.testing.assert_close(value, part @ right, rtol=1e-3, atol=1e-3)


def test_both_tables_are_printed_and_the_model_is_left_as_it_was(tmp_path, capsys, monkeypatch):
    model = write_llama(tmp_path / "m", layers=3)
    texts = (
        write_calibration_text(tmp_path / "a.txt"),
        write_text(tmp_path / "b.txt", 300, seed=9),
    )
    kept = []
    monkeypatch.setattr(
        Layers,
        "__init__",
        lambda self, *given, made=Layers.__init__: kept.append(self) or made(self, *given),
    )
    main(
        [
            *(str(model), "--calibration", str(texts[0]), "--text", str(texts[1])),
            *("--sequences", "6", "--judged", "4", "--sequence-length", "32", "--step", "1"),
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| mlp.down_proj | INT4, GPTQ (4.25)") for line in lines) == 1
    sizes = {line.split(" | ")[0]: line.split(" | ")[1:] for line in lines[-7:]}
    total = sum(p.numel() for p in kept[0].modules[0, "mlp.up_proj"].parameters())
    assert total == 128 * 64
    assert len(sizes) == 3 + 4
    lost = {done: abs(float(rest[1].strip(" |")) - 1) for done, rest in sizes.items()}
    int2, int8 = (lost[f"| all linear layers INT{bits}, GPTQ"] for bits in (2, 8))
    assert int8 < 0.01 < int2
    assert lost["| 4 cheapest pairs tied, 16 bits"] > int8
    for key, module in kept[0].modules.items():
        assert torch.equal(module.weight, kept[0].weights[key])
