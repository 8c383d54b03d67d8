"""Integer grids against searches written out in plain Python."""

from __future__ import annotations

import pytest
import torch

from taut_deploy.compress.quantize.grid import GridSpec, encode, fake_quantize_tokens, fit_grid
from taut_deploy.compress.quantize.rtn import quantize_weight

SHRINKS = [1.0 - 0.0125 * step for step in range(33)]


def matrix(seed: int = 0) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))


def group_error(group, importance, scale, zero):
    """Weighted squared error of one group on one grid, every code tried for every weight."""
    return sum(
        cost * min((w - (code - zero) * scale) ** 2 for code in range(-8, 8))
        for w, cost in zip(group, importance, strict=True)
    )


def exhaustive_error(group, importance, kind):
    """The smallest error over all candidate ranges."""
    errors = []
    for shrink in SHRINKS:
        if kind == "signed":  # the far end is given the lowest code, whichever its sign
            scale, zero = -max(group, key=abs) * shrink / 7.5, 0
        elif kind == "symmetric":
            scale, zero = max(abs(w) for w in group) * shrink / 7.5, 0
        else:
            low, high = min(0.0, *group) * shrink, max(0.0, *group) * shrink
            scale = (high - low) / 15
            zero = max(-8, min(7, round(-8 - low / scale)))
        errors.append(group_error(group, importance, scale, zero))
    return min(errors)


@pytest.mark.parametrize("kind", ["signed", "symmetric", "asymmetric"])
@pytest.mark.parametrize("group_size", [None, 4, 2])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_grid_found_is_the_best_of_all_candidates(kind, group_size, weighted):
    weight = matrix()
    importance = torch.rand(8, generator=torch.Generator().manual_seed(1)) if weighted else None
    spec = GridSpec(4, group_size, kind != "asymmetric", torch.float32, kind == "signed")
    scale, zero = fit_grid(weight, spec, importance)
    size = group_size or 8
    costs = [1.0] * 8 if importance is None else importance.double().tolist()
    for row in range(8):
        for index in range(8 // size):
            span = slice(index * size, (index + 1) * size)
            group = weight[row, span].double().tolist()
            got_zero = 0 if zero is None else int(zero[row, index])
            got = group_error(group, costs[span], float(scale[row, index]), got_zero)
            assert got == pytest.approx(exhaustive_error(group, costs[span], kind), rel=1e-4)


@pytest.mark.parametrize("num_bits", [2, 3, 4])
def test_a_signed_scale_gives_the_far_end_the_lowest_code(num_bits):
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(4))
    signed = GridSpec(num_bits, 32, True, torch.bfloat16, signed_scales=True)
    quantized = quantize_weight(weight, signed)
    far = weight.gather(1, weight.abs().argmax(1, keepdim=True))
    assert bool((quantized.codes.gather(1, weight.abs().argmax(1, keepdim=True)) < 0).all())
    assert torch.equal(quantized.scale.sign().float(), -far.sign())

    def error(spec):
        return float((quantize_weight(weight, spec).dequantize() - weight).square().mean())

    assert error(signed) < 0.98 * error(GridSpec(num_bits, 32, True, torch.bfloat16))


def test_importance_moves_the_grid_towards_the_channels_that_matter():
    weight, importance = matrix(), torch.ones(8)
    importance[3] = 1000.0
    spec = GridSpec(4, None, True, torch.float32)

    def error_of_channel_3(quantized):
        return (quantized.dequantize() - weight)[:, 3].square().sum()

    plain, weighted = quantize_weight(weight, spec), quantize_weight(weight, spec, importance)
    assert error_of_channel_3(weighted) < 0.85 * error_of_channel_3(plain)


@pytest.mark.parametrize("num_bits", [4, 8])
def test_codes_stay_in_range_and_scales_are_exact_in_their_dtype(num_bits):
    spec = GridSpec(num_bits, 4 if num_bits == 4 else None, num_bits == 8, torch.bfloat16)
    quantized = quantize_weight(matrix() * 100, spec)
    assert quantized.scale.dtype is torch.bfloat16
    assert quantized.codes.min() >= spec.low
    assert quantized.codes.max() <= spec.high
    nearest = encode(matrix() * 100, quantized.scale, quantized.zero, spec)
    assert torch.equal(nearest.to(torch.int8), quantized.codes)


@pytest.mark.parametrize(("symmetric", "signed"), [(True, True), (True, False), (False, False)])
def test_a_group_of_zeros_stays_zero(symmetric, signed):
    weight = matrix()
    weight[2, :4] = 0.0
    quantized = quantize_weight(weight, GridSpec(4, 4, symmetric, torch.bfloat16, signed))
    assert torch.equal(quantized.dequantize()[2, :4], torch.zeros(4))
    assert torch.isfinite(quantized.scale).all()


def test_a_group_size_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="group_size 3 does not divide K = 8"):
        fit_grid(matrix(), GridSpec(4, 3, True, torch.float32))


def test_eight_bit_codes_are_those_of_optimum_quanto():
    from optimum.quanto import AbsmaxOptimizer, qint8
    from optimum.quanto import quantize_weight as quanto

    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    theirs = AbsmaxOptimizer()(weight, qtype=qint8, axis=0)
    expected = quanto(weight, qtype=qint8, axis=0, scale=theirs, activation_qtype=None)
    spec = GridSpec(8, None, True, torch.float32)
    # On their scales our codes are theirs; our own scales differ by the convention: half a step.
    ours = encode(weight, theirs, None, spec).to(torch.int8)
    assert torch.equal(ours, expected._data)
    assert len(ours.unique()) > 100
    torch.testing.assert_close(fit_grid(weight, spec)[0] * 127.5, theirs * 127)


def test_activations_are_rounded_on_a_scale_per_token():
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(3))
    x[1, 2] = 0.0
    got = fake_quantize_tokens(x)
    for index in torch.cartesian_prod(torch.arange(3), torch.arange(5)).tolist():
        row = x[tuple(index)].double()
        step = row.abs().max() / 127
        expected = [round(v / float(step)) * float(step) if step > 0 else 0.0 for v in row.tolist()]
        assert got[tuple(index)].tolist() == pytest.approx(expected, abs=1e-6)
    assert fake_quantize_tokens(x.half()).dtype is torch.float16
