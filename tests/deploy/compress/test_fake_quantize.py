"""Straight-through rounding: values of the checkpoint's grid, gradients by their definition."""

from __future__ import annotations

import pytest
import torch

from taut_deploy.compress.quantize.scales import expand
from taut_deploy.compress.train.fake_quantize import (
    Grid,
    codes_of,
    collapse,
    fake_quantize,
    nearest_in_cell,
)

INT4 = Grid.of_integers(4)


def brute_force(weight, scale, zero, grid, gradient):
    """Value and both gradients, one weight at a time."""
    n, k = weight.shape
    rows, columns = (-(-n // scale.shape[0]), -(-k // scale.shape[1]))
    value, of_weight, of_scale = weight.clone(), weight.clone(), torch.zeros_like(scale)
    for i in range(n):
        for j in range(k):
            at = (i // rows, j // columns)
            z = 0.0 if zero is None else float(zero[at])
            place = float(weight[i, j]) / float(scale[at]) + z
            code = min(max(round(place), grid.low), grid.high)
            inside = grid.low - 0.5 <= place <= grid.high + 0.5
            value[i, j] = (code - z) * scale[at]
            of_weight[i, j] = gradient[i, j] * inside
            step = code - z - ((place - z) if inside else 0.0)
            of_scale[at] += gradient[i, j] * step
    return value, of_weight, of_scale


@pytest.mark.parametrize("entries", [(8, 1), (8, 2), (2, 4), (3, 3)], ids=str)
@pytest.mark.parametrize("shifted", [False, True], ids=["symmetric", "zero points"])
def test_matches_brute_force(entries, shifted):
    torch.manual_seed(0)
    weight = torch.randn(8, 8, requires_grad=True)
    scale = torch.rand(entries) * 0.2 + 0.05  # the smallest clamp
    scale[1:2] *= -1  # of a symmetric integer grid a scale may have either sign
    scale.requires_grad_()
    zero = torch.randint(-4, 4, entries).to(torch.int8) if shifted else None
    gradient = torch.randn(8, 8)
    value = fake_quantize(weight, scale, zero, INT4)
    value.backward(gradient)
    expected = brute_force(weight.detach(), scale.detach(), zero, INT4, gradient)
    for got, wanted in zip((value.detach(), weight.grad, scale.grad), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert not bool((weight.grad != 0).all()), "some weights are clamped in this test"


@pytest.mark.parametrize("entries", [(1,), (5, 1), (5, 7), (2, 3)], ids=str)
def test_collapse_is_the_transpose_of_expand(entries):
    torch.manual_seed(1)
    values, shared = torch.randn(5, 7), torch.randn(entries)
    spread = expand(shared, torch.Size((5, 7))).broadcast_to(5, 7)
    torch.testing.assert_close(
        (spread * values).sum(), (shared * collapse(values, shared)).sum(), rtol=1e-5, atol=1e-5
    )


def test_float8_values_are_those_of_the_type():
    torch.manual_seed(2)
    weight, scale = torch.randn(4, 6), torch.rand(4, 1) / 100 + 0.01
    value = fake_quantize(weight, scale, None, Grid.of_float8())
    expected = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(value, expected)


def test_cells_keep_the_codes_and_come_nearest():
    torch.manual_seed(3)
    weight, scale = torch.randn(6, 8), torch.rand(6, 2) * 0.2 + 0.2
    codes = codes_of(weight + 0.1 * torch.randn(6, 8), scale, None, INT4)
    moved = nearest_in_cell(weight, codes, scale, None)
    assert torch.equal(codes_of(moved, scale, None, INT4), codes)
    kept = codes_of(weight, scale, None, INT4) == codes
    assert bool(kept.any()) and not bool(kept.all())
    near_middle = kept & ((weight / expand(scale, weight.shape) - codes).abs() < 0.49)
    torch.testing.assert_close(moved[near_middle], weight[near_middle])
