"""GPTQ against the plain form of its algorithm, and against rounding."""

from __future__ import annotations

import pytest
import torch

from taut_deploy.compress.quantize import gptq, rtn
from taut_deploy.compress.quantize.grid import GridSpec, fit_grid


def correlated(tokens: int, k: int, seed: int = 0) -> torch.Tensor:
    """Inputs [tokens, k] whose channels are strongly correlated and of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=generator) * torch.logspace(0, -2, k)[:, None]
    return torch.randn(tokens, k, generator=generator) @ mixing


def column_by_column(weight, hessian, scale, zero, group, order, dampening, mask=None):
    """Optimal brain quantisation with an explicit inverse, in float64."""
    remaining, codes = weight.double().clone(), torch.zeros(weight.shape, dtype=torch.int8)
    damp = dampening * hessian.diagonal().double().mean()
    inverse = torch.linalg.inv(hessian.double() + damp * torch.eye(len(hessian)))
    for i in order:
        s, z = scale[:, i // group].double(), zero[:, i // group].double()
        code = (remaining[:, i] / s + z).round().clamp(-8, 7)
        code = code if mask is None else torch.where(mask[:, i], code, z)
        error = (remaining[:, i] - (code - z) * s) / inverse[i, i]
        remaining -= error[:, None] * inverse[i][None]
        inverse = inverse - inverse[:, i, None] * inverse[None, i] / inverse[i, i]
        inverse[i, i] = 1.0
        codes[:, i] = code.to(torch.int8)
    return codes


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(("symmetric", "signed"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("group", [8, 4])
def test_codes_equal_the_column_by_column_form(act_order, symmetric, signed, group):
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    x = correlated(64, 8)
    hessian = x.T @ x / 64
    spec = GridSpec(4, group, symmetric, torch.float32, signed)
    got = gptq.quantize_weight(weight, gptq.feedback_of(hessian, act_order=act_order), spec)
    scale, zero = fit_grid(weight, spec, hessian.diagonal())
    zero = torch.zeros_like(scale) if zero is None else zero
    order = hessian.diagonal().argsort(descending=True).tolist() if act_order else list(range(8))
    expected = column_by_column(weight, hessian, scale, zero, group, order, 0.01)
    assert torch.equal(got.codes, expected)
    assert not torch.equal(got.codes, rtn.quantize_weight(weight, spec, hessian.diagonal()).codes)


@pytest.mark.parametrize("symmetric", [True, False])
def test_pruned_weights_stay_zero_and_the_others_make_up_for_them(symmetric):
    generator = torch.Generator().manual_seed(1)
    weight, mask = torch.randn(8, 8, generator=generator), torch.rand(8, 8) > 0.5
    x = correlated(64, 8)
    hessian = x.T @ x / 64
    spec = GridSpec(4, 4, symmetric, torch.float32)
    got = gptq.quantize_weight(
        weight * mask, gptq.feedback_of(hessian, act_order=False), spec, mask=mask
    )
    scale, zero = fit_grid(weight * mask, spec, hessian.diagonal())
    zero = torch.zeros_like(scale) if zero is None else zero
    order = range(8)
    expected = column_by_column(weight * mask, hessian, scale, zero, 4, order, 0.01, mask)
    assert torch.equal(got.codes, expected)
    assert (got.dequantize()[~mask] == 0).all()


def test_lazy_blocks_change_nothing():
    weight = torch.randn(16, 320, generator=torch.Generator().manual_seed(2))
    x = correlated(1024, 320)
    spec = GridSpec(4, 32, False, torch.float32)
    got = gptq.quantize_weight(weight, gptq.feedback_of(x.T @ x / 1024, act_order=False), spec)
    scale, zero = fit_grid(weight, spec, (x.T @ x / 1024).diagonal())
    expected = column_by_column(weight, x.T @ x / 1024, scale, zero, 32, range(320), 0.01)
    # Sums are taken in another order, so a few values near the middle may fall differently.
    assert (got.codes != expected).float().mean() < 0.01


@pytest.mark.parametrize(("group", "symmetric"), [(32, True), (32, False), (64, False)])
def test_output_error_is_below_rounding_on_inputs_not_seen(group, symmetric):
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(3))
    x = correlated(4096, 128)
    seen, held_out = x[:2048], x[2048:]
    hessian = seen.T @ seen / len(seen)
    spec = GridSpec(4, group, symmetric, torch.bfloat16)

    def error_of(quantized):
        return (held_out @ (quantized.dequantize() - weight).T).square().sum()

    best_rounding = min(
        error_of(rtn.quantize_weight(weight, spec)),
        error_of(rtn.quantize_weight(weight, spec, hessian.diagonal())),
    )
    fed_back = gptq.quantize_weight(weight, gptq.feedback_of(hessian), spec)
    assert error_of(fed_back) < 0.7 * best_rounding


def test_channels_never_active_do_no_harm():
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(4))
    x = correlated(64, 8)
    x[:, 5] = 0.0
    spec = GridSpec(4, 8, True, torch.float32)
    quantized = gptq.quantize_weight(weight, gptq.feedback_of(x.T @ x / 64), spec)
    assert torch.isfinite(quantized.dequantize()).all()
    error = (x @ (quantized.dequantize() - weight).T).square().sum()
    assert error < 0.05 * (x @ weight.T).square().sum()


def test_a_rank_deficient_hessian_is_dampened_until_it_can_be_inverted():
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(5)) * 1e4
    hessian = x.T @ x
    before = hessian.clone()
    factor = gptq.feedback_of(hessian, dampening_frac=1e-12).factor
    assert torch.equal(hessian, before), "others read it"
    assert torch.isfinite(factor).all()
    assert torch.equal(factor, factor.triu())


def test_a_hessian_with_nan_is_refused():
    hessian = torch.eye(4)
    hessian[1, 1] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        gptq.feedback_of(hessian)
