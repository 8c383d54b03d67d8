"""HQQ and learned rounding: never worse than where they begin, better where it matters."""

from __future__ import annotations

import pytest
import torch
from tiny_blocks import make_block
from tiny_inputs import correlated

from taut_deploy.compress.quantize import hqq, rounding, rtn
from taut_deploy.compress.quantize.float8 import Float8Spec, round_fp8
from taut_deploy.compress.quantize.grid import GridSpec, QuantizedWeight

SPEC = GridSpec(4, 32, False, torch.float32)


@pytest.mark.parametrize(("symmetric", "signed"), [(True, True), (True, False), (False, False)])
def test_hqq_lowers_the_robust_error_of_plain_rounding(symmetric, signed):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 128, generator=generator)
    weight[::3, ::17] *= 8  # a few outliers, which a squared error would chase
    spec = GridSpec(4, 64, symmetric, torch.bfloat16, signed)

    def robust(quantized):
        return float((quantized.dequantize() - weight).abs().pow(0.7).sum())

    assert robust(hqq.quantize_weight(weight, spec)) < robust(rtn.quantize_weight(weight, spec))


def test_hqq_keeps_zeros_zero():
    quantized = hqq.quantize_weight(torch.zeros(4, 32), SPEC)
    assert bool((quantized.dequantize() == 0).all())


def layer_problem() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = torch.nn.ModuleDict({"only": torch.nn.Linear(32, 8, bias=False)})
    return layer, correlated(8 * 16, 32).view(8, 16, 32)


def learn(block, hidden, weight, start, steps):
    return rounding.learn_rounding(
        block,
        {"only": rounding.start_from(weight, start, SPEC)},
        hidden,
        hidden @ weight.T,
        lambda module, x: module["only"](x),
        steps=steps,
    )["only"]


def test_a_start_stands_for_its_codes():
    block, hidden = layer_problem()
    weight = block["only"].weight.data.clone()
    start = rtn.quantize_weight(weight, SPEC)
    moved = QuantizedWeight((start.codes + 1).clamp(max=7), start.scale, start.zero)
    for quantized in (start, moved):
        got = learn(block, hidden, weight, quantized, 0)
        assert torch.equal(got.codes, quantized.codes)
        assert torch.equal(got.scale, quantized.scale)


def test_steps_lower_the_output_error_on_sequences_that_judge():
    block, hidden = layer_problem()
    weight = block["only"].weight.data.clone()
    start = rtn.quantize_weight(weight, SPEC)
    got = learn(block, hidden, weight, start, 100)
    assert torch.equal(block["only"].weight.data, weight), "the block is left as it was"

    def error_of(quantized):
        return float((hidden[:1] @ (quantized.dequantize() - weight).T).square().sum())

    assert error_of(got) < 0.8 * error_of(start)
    again = learn(block, hidden, weight, start, 100)
    assert torch.equal(got.codes, again.codes)
    assert torch.equal(got.scale, again.scale)


@torch.no_grad()
def test_a_pruned_weight_stays_zero_though_moving_it_would_help():
    block, hidden = layer_problem()
    weight = block["only"].weight.data.clone()
    mask = torch.ones_like(weight, dtype=torch.bool)
    mask[:, ::2] = False
    start = rtn.quantize_weight(weight * mask, SPEC)
    found = {}
    for name, kept in (("kept", mask), ("forgotten", None)):
        found[name] = rounding.learn_rounding(
            block,
            {"only": rounding.start_from(weight * mask, start, SPEC, kept)},
            hidden,
            hidden @ weight.T,
            lambda module, x: module["only"](x),
            steps=20,
            rate=0.6,
        )["only"].dequantize()
    assert bool((found["kept"][~mask] == 0).all())
    assert not torch.equal(found["kept"], start.dequantize()), "the others did move"
    assert bool((found["forgotten"][~mask] != 0).any())


def test_all_layers_of_a_block_are_tuned_together():
    block, _, arguments = make_block("llama")
    hidden = torch.randn(17, 10, 64, generator=torch.Generator().manual_seed(1))
    arguments = {"position_embeddings": arguments["position_embeddings"]}

    def call(module, x):
        out = module(x, **arguments)
        return out[0] if isinstance(out, tuple) else out

    with torch.no_grad():
        target = call(block, hidden)
    linears = {n: m for n, m in block.named_modules() if isinstance(m, torch.nn.Linear)}
    starts = {
        name: rounding.start_from(
            layer.weight.data, rtn.quantize_weight(layer.weight.data, SPEC), SPEC
        )
        for name, layer in linears.items()
    }
    got = rounding.learn_rounding(block, starts, hidden, target, call, steps=40)
    assert got.keys() == linears.keys()

    @torch.no_grad()
    def error_of(weights):
        for name, layer in linears.items():
            layer.weight.data = weights[name]
        return float((call(block, hidden[:1]) - target[:1]).square().sum())

    before = {n: rtn.quantize_weight(m.weight.data, SPEC).dequantize() for n, m in linears.items()}
    after = {name: weight.dequantize() for name, weight in got.items()}
    assert error_of(after) < error_of(before)


def test_one_sequence_is_refused():
    block, hidden = layer_problem()
    weight = block["only"].weight.data
    with pytest.raises(ValueError, match="at least 2 calibration sequences"):
        learn(block, hidden[:1], weight, rtn.quantize_weight(weight, SPEC), 1)


def test_inputs_that_are_not_finite_are_refused():
    block, hidden = layer_problem()
    weight = block["only"].weight.data
    hidden[0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        learn(block, hidden, weight, rtn.quantize_weight(weight, SPEC), 1)


def test_a_float_start_stands_for_its_codes_and_steps_are_its_numbers_distances():
    numbers = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    spec = Float8Spec(torch.float32)
    distances = spec.step_at(numbers[:-1])
    assert torch.equal(distances, numbers[1:] - numbers[:-1])
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(2))
    quantized = rtn.quantize_weight(weight, spec)
    start = rounding.start_from(weight, quantized, spec)
    assert torch.equal(round_fp8(start.latent), quantized.codes.float())
