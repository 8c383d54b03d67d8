"""FP8 grids against all 256 numbers written out."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from taut_deploy.compress.formats.activations import Float8Fixed
from taut_deploy.compress.quantize import gptq
from taut_deploy.compress.quantize.float8 import (
    Float8Spec,
    fake_quantize_tokens_fp8,
    round_fp8,
    to_fp8,
)

# Sign, four bits of exponent around 7, three of fraction; two patterns are NaN.
NUMBERS = sorted(
    {
        sign * (2.0 ** max(exponent - 7, -6) * ((exponent > 0) + fraction / 8))
        for sign in (1, -1)
        for exponent in range(16)
        for fraction in range(8)
        if (exponent, fraction) != (15, 7)
    }
)


def nearest(value: float) -> float:
    """The least distance to any number of the format."""
    return min(abs(number - value) for number in NUMBERS)


def matrix(seed: int = 0) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))


def test_rounding_takes_the_nearest_of_all_numbers():
    values = torch.cat([matrix().flatten() * 300, matrix(1).flatten() * 0.01])
    for value, got in zip(values.tolist(), to_fp8(values).float().tolist(), strict=True):
        assert got in NUMBERS
        assert abs(got - value) == pytest.approx(nearest(value), rel=1e-5, abs=1e-9)


def test_rounding_in_fp32_takes_the_nearest_and_of_two_the_even_one():
    ends = torch.tensor([449.0, -1e9, torch.inf, -torch.inf])
    assert round_fp8(ends).tolist() == [448.0, -448.0, 448.0, -448.0]
    assert round_fp8(torch.tensor([torch.nan])).isnan().all()
    assert round_fp8(torch.tensor(NUMBERS)).tolist() == NUMBERS
    for below, above in pairwise(NUMBERS):
        middle = (below + above) / 2
        nearly = torch.tensor([middle]).nextafter(torch.tensor([[below], [above]]))
        assert round_fp8(nearly).flatten().tolist() == [below, above]
        # The even one has a last bit of zero: a multiple of two steps.
        even = below if (below / (above - below)) % 2 == 0 else above
        assert round_fp8(torch.tensor([middle])).item() == even


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grid_spans_each_channel_and_its_scale_is_exact_in_its_dtype(dtype):
    weight = matrix() * torch.logspace(-3, 3, 8)[:, None]
    weight[5] = 0.0
    grid = Float8Spec(dtype).fit(weight)
    codes = grid.encode(weight)
    assert codes.scale.dtype is dtype
    rows = [row for row in range(8) if row != 5]
    assert (codes.codes[rows].float().abs().amax(1) >= 440).all()
    assert torch.equal(codes.dequantize()[5], torch.zeros(8))
    # Half a step of three bits of fraction, and the scale's own rounding.
    error = (codes.dequantize() - weight).abs()
    assert (error <= weight.abs() * 2**-4 * 1.02 + codes.scale.float() * 2**-10).all()
    assert torch.equal(grid.encode(grid.round(weight)).codes.float(), codes.codes.float())


def test_columns_are_rounded_as_the_whole():
    weight = matrix()
    grid = Float8Spec(torch.bfloat16).fit(weight)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    rounded = grid.by_column(order)
    whole = grid.round(weight)
    for position, column in enumerate(order.tolist()):
        assert torch.equal(rounded(position, weight[:, column]), whole[:, column])


def test_error_feedback_lowers_the_output_error():
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))
    x = x @ torch.randn(32, 32, generator=torch.Generator().manual_seed(2))
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(4))
    spec = Float8Spec(torch.float32)

    def error_of(rounded):
        return (x @ (rounded - weight).T).square().sum()

    fed_back = gptq.quantize_weight(weight, gptq.feedback_of(x.T @ x / 256), spec)
    assert error_of(fed_back.dequantize()) < 0.8 * error_of(spec.fit(weight).round(weight))


def test_a_fixed_scale_spans_what_calibration_saw_and_cuts_the_rest():
    inputs = Float8Fixed(torch.float32)
    scale = inputs.scale(torch.tensor([1.0, 896.0, 3.0]))
    assert scale.tolist() == [2.0]
    got = inputs.round(torch.tensor([[896.0, -2000.0, 5.1, 0.0]]), scale)
    assert got.tolist() == [[896.0, -896.0, 5.0, 0.0]]
    with pytest.raises(TypeError, match="a scale fixed beforehand is needed"):
        inputs.round(got)


def test_tokens_are_rounded_each_on_its_own():
    x = matrix() * torch.logspace(-4, 4, 8)[:, None]
    got = fake_quantize_tokens_fp8(x)
    for row, rounded in zip(x.double(), got.double(), strict=True):
        scale = row.abs().max() / 448
        for value, found in zip((row / scale).tolist(), (rounded / scale).tolist(), strict=True):
            assert abs(found - value) == pytest.approx(nearest(value), rel=1e-3, abs=1e-4)
