"""Statistics of a block's inputs against sums written out."""

from __future__ import annotations

import pytest
import torch
from tiny_blocks import make_block

from taut_deploy.compress.calibrate.observe import observe_block


def inputs_by_hooks(block, hidden, arguments):
    """Every linear's input rows over all of ``hidden``, by name."""
    seen: dict[str, torch.Tensor] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _module, args, name=name: seen.__setitem__(name, args[0].flatten(0, -2).double())
        )
        for name, module in block.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    block(hidden, **arguments)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@torch.no_grad()
def test_statistics_are_those_of_all_rows(batch_size):
    block, _, arguments = make_block("llama")
    hidden = torch.randn(5, 10, 64, generator=torch.Generator().manual_seed(1))
    groups = observe_block(block, hidden, arguments, batch_size)
    rows = inputs_by_hooks(block, hidden, arguments)
    assert sorted(name for group in groups for name in group.layers) == sorted(rows)
    for group in groups:
        expected = rows[group.layers[0]]
        assert group.tokens == len(expected) == 50
        torch.testing.assert_close(
            group.hessian.double(), expected.T @ expected / 50, rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(group.absmax, expected.abs().amax(0).float())
        distances = torch.cdist(group.sample.double(), expected).amin(1)
        assert distances.max() < 1e-4, "every sampled row is one of the rows seen"
        assert len(group.sample) == 50, "few enough rows are all kept"


@torch.no_grad()
def test_layers_are_grouped_by_the_tensor_they_read():
    block, hidden, arguments = make_block("llama")
    groups = observe_block(block, hidden, arguments, 2)
    assert [(group.producer, [n.split(".")[-1] for n in group.layers]) for group in groups] == [
        ("input_layernorm", ["q_proj", "k_proj", "v_proj"]),
        (None, ["o_proj"]),
        ("post_attention_layernorm", ["gate_proj", "up_proj"]),
        (None, ["down_proj"]),
    ]


@torch.no_grad()
def test_observing_leaves_no_hook_behind():
    block, hidden, arguments = make_block("llama")
    observe_block(block, hidden, arguments, 2)
    for module in block.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


@torch.no_grad()
def test_long_calibration_is_sampled_evenly():
    block, _, arguments = make_block("llama")
    hidden = torch.randn(120, 10, 64, generator=torch.Generator().manual_seed(2))
    group = observe_block(block, hidden, arguments, 30)[0]
    assert group.tokens == 1200
    assert 256 <= len(group.sample) <= 512
