"""Pruning against brute force: what goes, and what the rest becomes."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny_inputs import correlated

from taut_deploy.compress.prune import magnitude, sparsegpt, wanda
from taut_deploy.compress.prune.patterns import Pattern, keep_highest, parse_pattern
from taut_deploy.compress.prune.refit import refit
from taut_deploy.compress.quantize import gptq, rtn
from taut_deploy.compress.quantize.grid import GridSpec

PATTERNS = ["2:4", "4:8", 0.5]


def problem(n: int = 8, k: int = 16, tokens: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(1))
    x = correlated(tokens, k)
    return weight, x.T @ x / tokens


def output_error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    return float(((difference @ hessian) * difference).sum())


@pytest.mark.parametrize(
    ("text", "pattern"), [("2:4", Pattern(0.5, 4)), ("4:8", Pattern(0.5, 8)), (0.25, Pattern(0.75))]
)
def test_patterns_are_read(text, pattern):
    assert parse_pattern(text) == pattern


@pytest.mark.parametrize("text", ["4:4", "0:4", "5:4", "1.0", 0, -0.5, "half", "2:4:8", "nan"])
def test_a_pattern_that_means_nothing_is_refused(text):
    with pytest.raises(ValueError, match="pattern"):
        parse_pattern(text)


@pytest.mark.parametrize("choose", [magnitude.mask, keep_highest])
def test_a_width_that_runs_do_not_divide_is_refused(choose):
    with pytest.raises(ValueError, match=r"2:4 needs input widths divisible by 4.*has 6"):
        choose(torch.ones(2, 6), Pattern(0.5, 4))


@pytest.mark.parametrize("run", [4, 8])
def test_runs_keep_their_highest_half(run):
    scores = torch.rand(3, 16, generator=torch.Generator().manual_seed(0))
    got = keep_highest(scores, Pattern(0.5, run))
    for row, start in itertools.product(range(3), range(0, 16, run)):
        part = scores[row, start : start + run]
        expected = part >= part.sort(descending=True).values[run // 2 - 1]
        assert torch.equal(got[row, start : start + run], expected)


def test_magnitude_compares_the_layer_and_wanda_the_row():
    weight = torch.tensor([[1.0, -2.0, 3.0, 4.0], [10.0, 20.0, -30.0, 40.0]])
    assert magnitude.mask(weight, Pattern(0.5)).tolist() == [[False] * 4, [True] * 4]
    square = torch.tensor([100.0, 1.0, 1.0, 1.0])
    expected = [[True, False, False, True], [True, False, False, True]]
    assert wanda.mask(weight, square, Pattern(0.5)).tolist() == expected


def column_by_column(weight, hessian, run, dampening):
    """SparseGPT for n:m runs with an explicit inverse, in float64."""
    remaining = weight.double().clone()
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    damp = dampening * hessian.diagonal().double().mean()
    inverse = torch.linalg.inv(hessian.double() + damp * torch.eye(len(hessian)))
    # Costs as the inverse stands when a column is reached, not when its run begins.
    reduced, pivots = inverse.clone(), []
    for i in range(len(hessian)):
        pivots.append(reduced[i, i].clone())
        reduced = reduced - reduced[:, i, None] * reduced[None, i] / reduced[i, i]
        reduced[i, i] = 1.0
    for i in range(len(hessian)):
        if i % run == 0:
            cost = remaining[:, i : i + run].square() / torch.stack(pivots[i : i + run])
            top = cost.topk(run // 2, 1).indices
            mask[:, i : i + run].scatter_(1, top, True)
        error = remaining[:, i] * ~mask[:, i] / inverse[i, i]
        remaining -= error[:, None] * inverse[i][None]
        inverse = inverse - inverse[:, i, None] * inverse[None, i] / inverse[i, i]
        inverse[i, i] = 1.0
    return remaining * mask, mask


def in_order(hessian: torch.Tensor) -> gptq.Feedback:
    return gptq.feedback_of(hessian, act_order=False)


@pytest.mark.parametrize("run", [4, 8])
def test_sparsegpt_equals_the_column_by_column_form(run):
    weight, hessian = problem()
    got, mask = sparsegpt.prune_weight(weight, in_order(hessian), Pattern(0.5, run))
    expected, expected_mask = column_by_column(weight, hessian, run, 0.01)
    assert torch.equal(mask, expected_mask)
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_sparsegpt_is_sparse_as_asked_and_better_than_wanda(pattern):
    weight, hessian = problem(48, 256, 4096)
    pattern = parse_pattern(pattern)
    got, mask = sparsegpt.prune_weight(weight, in_order(hessian), pattern)
    assert abs(float(mask.float().mean()) - 0.5) < 0.01
    assert torch.equal(got != 0, mask)
    by_wanda = weight * wanda.mask(weight, hessian.diagonal(), pattern)
    error = output_error(got - weight, hessian)
    assert error < 0.7 * output_error(by_wanda - weight, hessian)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_masked_gptq_after_refitting_loses_less_than_rounding_what_stays(pattern, symmetric):
    weight, hessian = problem(16, 64, 1024)
    spec = GridSpec(4, 32, symmetric, torch.bfloat16)
    pruned, mask = sparsegpt.prune_weight(weight, in_order(hessian), parse_pattern(pattern))
    fitted = refit(weight, pruned, mask, hessian)
    dense = gptq.quantize_weight(fitted, gptq.feedback_of(hessian), spec, mask=mask).dequantize()
    assert bool((dense[~mask] == 0).all())
    rounded = rtn.quantize_weight(pruned, spec).dequantize()
    assert bool((rounded[~mask] == 0).all())
    error = output_error(dense - weight, hessian)
    assert error < 0.8 * output_error(rounded - weight, hessian)


def test_refit_reaches_the_least_squares_of_every_row():
    weight, hessian = problem()
    mask = magnitude.mask(weight, Pattern(0.5))
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(16)
    got = refit(weight, weight * mask, mask, hessian, iterations=400)
    for row in range(8):
        kept = mask[row]
        expected = torch.linalg.solve(
            damped[kept][:, kept].double(), (damped[kept] @ weight[row]).double()
        )
        torch.testing.assert_close(got[row][kept].double(), expected, rtol=2e-2, atol=2e-2)
        assert bool((got[row][~kept] == 0).all())


def test_refit_makes_no_row_worse():
    weight, hessian = problem(48, 64, 1024)
    start, mask = sparsegpt.prune_weight(weight, in_order(hessian), Pattern(0.5, 4))
    got = refit(weight, start, mask, hessian)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(64)
    before = ((start - weight) @ damped * (start - weight)).sum(1)
    after = ((got - weight) @ damped * (got - weight)).sum(1)
    assert bool((after <= before * (1 + 1e-4)).all())
    assert after.sum() < 0.95 * before.sum()


def test_channels_never_active_are_pruned_without_harm():
    weight, hessian = problem()
    hessian[5], hessian[:, 5] = 0.0, 0.0
    got, _ = sparsegpt.prune_weight(weight, in_order(hessian), Pattern(0.5))
    assert bool(torch.isfinite(got).all())
    assert bool((got[:, 5] == 0).all())
