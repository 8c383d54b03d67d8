"""Smoothing: what is folded leaves the block's function alone, and helps where it should."""

from __future__ import annotations

import pytest
import torch
from tiny_blocks import FAMILIES, make_block
from torch import nn

from taut_deploy.compress.calibrate.observe import observe_block
from taut_deploy.compress.equalize.fold import find_fold
from taut_deploy.compress.equalize.smoothquant import (
    CANDIDATE_ALPHAS,
    choose_scales,
    smoothing_scales,
)
from taut_deploy.compress.quantize.grid import GridSpec, fake_quantize_tokens
from taut_deploy.compress.quantize.rtn import quantize_weight


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_folding_random_factors_leaves_the_block_unchanged(family):
    block, hidden, arguments = make_block(family)
    before = block(hidden, **arguments)
    groups = observe_block(block, hidden, arguments, 1)
    folded = []
    for group in groups:
        fold = find_fold(block, group)
        assert fold is not None, group.layers
        generator = torch.Generator().manual_seed(len(folded))
        wanted = fold.tie(torch.rand(len(group.absmax), generator=generator) * 4 + 0.1)
        scales = fold.apply(wanted)
        assert scales.std() > 0.1, "factors that are all alike would prove nothing"
        for name in group.layers:
            layer = block.get_submodule(name)
            layer.weight.data = layer.weight.data * scales
        folded.append(tuple(group.layers))
    after = block(hidden, **arguments)
    assert [layers[-1].split(".")[-1] for layers in folded] == [
        "v_proj",
        "o_proj",
        "up_proj",
        "down_proj",
    ]
    torch.testing.assert_close(after, before, rtol=2e-4, atol=2e-5)


@torch.no_grad()
def test_factors_are_tied_over_the_heads_that_share_a_value():
    block, hidden, arguments = make_block("llama")
    attention = observe_block(block, hidden, arguments, 1)[1]
    assert attention.layers == ["self_attn.o_proj"]
    wanted = torch.arange(1.0, 65.0)
    tied = find_fold(block, attention).tie(wanted).view(2, 2, 16)
    assert torch.equal(tied[:, 0], tied[:, 1])
    heads = wanted.view(2, 2, 16)
    torch.testing.assert_close(tied[:, 0], (heads[:, 0] * heads[:, 1]).sqrt())


class PlainMLP(nn.Module):
    """No gate: a squared ReLU, called as a function, between up and down."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(64, 128)
        self.down_proj = nn.Linear(128, 64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.up_proj(hidden).relu().square())


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = PlainMLP()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mlp(hidden)


@torch.no_grad()
def test_an_activation_between_up_and_down_takes_no_factors():
    """The product of a gate is linear in the up projection; squared ReLU is not."""
    torch.manual_seed(0)
    block = PlainBlock()
    groups = observe_block(block, torch.randn(2, 5, 64), {}, 1)
    assert [group.layers for group in groups] == [["mlp.up_proj"], ["mlp.down_proj"]]
    assert find_fold(block, groups[1]) is None


def test_factors_are_those_of_the_paper_up_to_their_mean():
    weights = [torch.tensor([[1.0, 4.0], [-2.0, 0.5]]), torch.tensor([[0.5, -8.0]])]
    scales = smoothing_scales(torch.tensor([100.0, 1.0]), weights, 0.75)
    expected = torch.tensor([100**0.75 / 2**0.25, 1 / 8**0.25])
    torch.testing.assert_close(scales, expected / expected.log().mean().exp())
    dead = smoothing_scales(torch.tensor([0.0, 1.0]), weights, 0.5)
    assert dead[0] == 1.0


def outlier_problem():
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(64, 32, generator=generator)
    sample[:, 3] *= 80.0
    weights = [torch.randn(16, 32, generator=generator) for _ in range(2)]
    spec = GridSpec(8, None, True, torch.float32)

    def product(x, weight):
        return fake_quantize_tokens(x) @ quantize_weight(weight, spec).dequantize().T

    def error_of(scales):
        return sum(
            float((product(sample / scales, w * scales) - sample @ w.T).square().sum())
            / float((sample @ w.T).square().sum())
            for w in weights
        )

    return sample, weights, product, error_of


def test_the_search_takes_the_candidate_of_least_error():
    sample, weights, product, error_of = outlier_problem()
    absmax = sample.abs().amax(0)
    chosen = choose_scales(sample, absmax, weights, product, None)
    candidates = [smoothing_scales(absmax, weights, alpha) for alpha in CANDIDATE_ALPHAS]
    assert error_of(chosen) == min(error_of(s) for s in [torch.ones(32), *candidates])
    assert error_of(chosen) < 0.2 * error_of(torch.ones(32)), "one loud channel is what it is for"


def test_a_given_strength_is_used_as_it_is():
    sample, weights, product, _ = outlier_problem()
    absmax = sample.abs().amax(0)
    got = choose_scales(sample, absmax, weights, product, 0.3)
    assert torch.equal(got, smoothing_scales(absmax, weights, 0.3))
