"""Low rank against brute force: the best factors, and the residual."""

from __future__ import annotations

import pytest
import torch
from tiny_inputs import correlated

from taut_deploy.compress.lowrank.interpolative import interpolate, interpolative_rank
from taut_deploy.compress.lowrank.residual import compensate, quantize_with_residual
from taut_deploy.compress.lowrank.whitened_svd import whiten
from taut_deploy.compress.quantize import gptq
from taut_deploy.compress.quantize.grid import GridSpec


def problem(n: int = 12, k: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(1))
    x = correlated(512, k)
    return weight, x.T @ x / 512


def output_error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    return float(((difference.double() @ hessian.double()) * difference.double()).sum())


def test_the_error_of_a_rank_is_the_sum_of_dropped_squares():
    weight, hessian = problem()
    spectrum = whiten(weight, hessian, dampening_frac=1e-6)
    for rank in (1, 4, 11):
        error = output_error(weight - spectrum.truncate(rank).product(), hessian)
        expected = float(spectrum.values[rank:].double().square().sum())
        assert error == pytest.approx(expected, rel=1e-2)
    torch.testing.assert_close(spectrum.truncate(12).product(), weight, rtol=1e-3, atol=1e-3)


def test_factors_beat_plain_svd_where_inputs_are_uneven():
    weight, hessian = problem()
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    plain = (u[:, :4] * s[:4]) @ v[:4]
    ours = whiten(weight, hessian).truncate(4).product()
    assert output_error(weight - ours, hessian) < 0.7 * output_error(weight - plain, hessian)


@pytest.mark.parametrize("rank", [0, 13])
def test_a_rank_that_does_not_fit_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank {rank} does not fit a layer of 12 x 16"):
        whiten(*problem()).truncate(rank)


def test_a_residual_of_full_rank_gives_the_weight_back():
    weight, hessian = problem()
    factors = compensate(weight, torch.zeros_like(weight), hessian, 12)
    torch.testing.assert_close(factors.product(), weight, rtol=1e-3, atol=1e-3)


def test_passes_only_improve_and_beat_codes_alone():
    weight, hessian = problem(24, 32)
    spec = GridSpec(4, 32, True, torch.float32)

    def quantizer(left):
        return gptq.quantize_weight(left, gptq.feedback_of(hessian), spec)

    errors = []
    for passes in (1, 2, 4):
        codes, factors = quantize_with_residual(weight, hessian, 2, quantizer, passes=passes)
        left = weight - codes.dequantize() - factors.product()
        errors.append(output_error(left, hessian))
    alone = output_error(weight - quantizer(weight).dequantize(), hessian)
    assert errors[0] < alone
    assert errors[0] >= errors[1] >= errors[2]
    assert errors[2] < errors[0]


def test_a_hessian_with_nan_is_refused():
    weight, hessian = problem()
    hessian[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        whiten(weight, hessian)


@pytest.mark.parametrize(("n", "k", "rank"), [(12, 16, 5), (24, 10, 9), (16, 16, 1), (10, 24, 9)])
def test_the_interpolative_form_is_the_same_product_in_fewer_numbers(n, k, rank):
    factors = whiten(*problem(n, k)).truncate(rank)
    found = interpolate(factors)
    assert (found.up.shape, found.down.shape) == ((n - rank, rank), (rank, k))
    assert sorted(found.order.tolist()) == list(range(n))
    dense = factors.up.double() @ factors.down.double()
    torch.testing.assert_close(found.product().double(), dense, rtol=1e-4, atol=1e-4)
    # The rows that are kept are rows of the product itself.
    for row, place in enumerate(found.order.tolist()):
        if place < rank:
            torch.testing.assert_close(found.down[place].double(), dense[row], rtol=1e-4, atol=1e-4)
    assert float(found.up.abs().max()) < 10


@pytest.mark.parametrize(("n", "k", "numbers"), [(576, 576, 265420), (192, 576, 88473), (5, 9, 31)])
def test_the_rank_is_the_largest_that_fits(n, k, numbers):
    sizes = [r * n + r * k - r * r for r in range(min(n, k) + 1)]
    best = max(r for r, size in enumerate(sizes) if size <= numbers)
    assert interpolative_rank(n, k, numbers) == best
