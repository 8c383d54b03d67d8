"""AWQ's factors and rotations: the function stays, rounding gets easier."""

from __future__ import annotations

import pytest
import torch
from tiny_blocks import FAMILIES, make_block
from tiny_inputs import correlated
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from taut_deploy.compress.calibrate.observe import observe_block
from taut_deploy.compress.equalize import awq
from taut_deploy.compress.equalize.hadamard import hadamard_matrix, random_rotation
from taut_deploy.compress.equalize.rotate import (
    fuse_norm,
    require_same_function,
    rotate_block,
    rotate_ends,
)
from taut_deploy.compress.quantize import rtn
from taut_deploy.compress.quantize.grid import GridSpec


@pytest.mark.parametrize("size", [1, 2, 12, 28, 36, 64, 576, 896, 960, 1536])
def test_hadamard_matrices_are_of_ones_with_orthogonal_rows(size):
    matrix = hadamard_matrix(size)
    assert bool((matrix.abs() == 1).all())
    assert torch.equal(matrix @ matrix.T, size * torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [7, 64, 100])
def test_rotations_are_orthogonal_and_repeatable(size):
    rotation = random_rotation(size, 3)
    eye = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(rotation @ rotation.T, eye, rtol=0, atol=1e-12)
    assert torch.equal(rotation, random_rotation(size, 3))
    assert not torch.equal(rotation, random_rotation(size, 4))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_turned_block_does_the_same_in_the_turned_basis(family):
    block, hidden, arguments = make_block(family)
    before = block(hidden, **arguments)
    weights = {name: p.clone() for name, p in block.named_parameters()}
    residual, heads = random_rotation(64, 0), random_rotation(16, 1)
    rotate_block(block, observe_block(block, hidden, arguments, 1), residual, heads)
    after = block((hidden.double() @ residual).float(), **arguments)
    require_same_function(before, after, residual)
    moved = [name for name, p in block.named_parameters() if not torch.equal(p, weights[name])]
    assert sum(name.endswith("proj.weight") for name in moved) == 7
    with pytest.raises(ValueError, match="turning the residual stream changes its output by 1"):
        require_same_function(before, after * 1.001, residual)


@pytest.mark.parametrize(
    ("config_type", "model_type", "extra"),
    [
        (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
        (Qwen2Config, Qwen2ForCausalLM, {}),
    ],
)
@torch.no_grad()
def test_a_turned_model_gives_the_same_logits(config_type, model_type, extra):
    torch.manual_seed(0)
    config = config_type(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        **extra,
    )
    model = model_type(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data = torch.empty_like(parameter).uniform_(0.5, 1.5)
    tokens = torch.arange(20).view(2, 10)
    before = model(tokens, use_cache=False).logits
    residual, heads = random_rotation(64, 0), random_rotation(16, 1)
    inputs = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda _module, args, kwargs: inputs.append((args[0], kwargs)), with_kwargs=True
        )
    model(tokens, use_cache=False)
    for layer, (hidden, arguments) in zip(model.model.layers, list(inputs), strict=True):
        rotate_block(layer, observe_block(layer, hidden, arguments, 2), residual, heads)
    embedding = model.model.embed_tokens
    embedding.weight.data = rotate_ends(
        embedding.weight.data, model.model.norm, model.lm_head, residual
    )
    torch.testing.assert_close(model(tokens, use_cache=False).logits, before, rtol=1e-4, atol=1e-4)


def test_a_norm_that_subtracts_a_mean_is_refused():
    with pytest.raises(ValueError, match="not a scaling RMSNorm"):
        fuse_norm(nn.LayerNorm(8), [nn.Linear(8, 8)])


def test_awq_takes_the_candidate_of_least_output_error():
    weights = [torch.randn(16, 32, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    x = correlated(512, 32)
    hessian = x.T @ x / 512
    spec = GridSpec(4, 32, False, torch.float32)

    def rounding(weight):
        return rtn.quantize_weight(weight, spec).dequantize()

    def error_of(scales):
        return sum(
            float(((x / scales) @ rounding(w * scales).T - x @ w.T).square().sum())
            / float((x @ w.T).square().sum())
            for w in weights
        )

    chosen = awq.choose_scales(hessian, weights, rounding)
    candidates = [torch.ones(32)] + [
        awq.channel_scales(hessian.diagonal(), weights, alpha, by_weight=by_weight)
        for alpha in awq.CANDIDATE_ALPHAS
        for by_weight in (False, True)
    ]
    assert error_of(chosen) == pytest.approx(min(map(error_of, candidates)), rel=1e-4)
    assert error_of(chosen) < 0.8 * error_of(torch.ones(32))
    tied = awq.choose_scales(hessian, weights, rounding, lambda s: s.mean().expand_as(s))
    assert bool((tied == tied[0]).all())


def test_awq_leaves_silent_channels_alone():
    square = torch.tensor([0.0, 4.0, 1.0])
    scales = awq.channel_scales(square, [torch.ones(2, 3)], 0.5)
    torch.testing.assert_close(scales, torch.tensor([1.0, 2**0.25, 2**-0.25]))
