"""Statistics of a block's inputs against sums written out."""

from __future__ import annotations

import pytest
import torch
from tiny_blocks import make_block
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from taut_deploy.compress.calibrate.observe import observe_block
from taut_deploy.compress.equalize.fold import find_fold


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


class Shared(nn.Module):
    """A norm whose output two layers read, and something else, too."""

    def __init__(self, elsewhere):
        super().__init__()
        self.norm, self.up, self.gate = nn.RMSNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.router = nn.Module()
        self.router.weight = nn.Parameter(torch.randn(4, 8))
        self.elsewhere = elsewhere

    def forward(self, hidden):
        x = self.norm(hidden)
        return hidden + self.up(x) * self.gate(x) + self.elsewhere(self, x)


ELSEWHERE = {
    "nothing": (lambda _block, _x: 0.0, False),
    "a view that nobody reads": (lambda _block, x: x.view(-1, 8).shape[0], False),
    "a router without a module": (
        lambda block, x: torch.nn.functional.linear(x.view(-1, 8), block.router.weight).amax(),
        True,
    ),
    "the residual": (lambda _block, x: x, True),
    "a copy": (lambda _block, x: x.transpose(0, 1).reshape(-1, 8).mean(), True),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_whoever_else_reads_an_input_is_seen(case):
    elsewhere, expected = ELSEWHERE[case]
    torch.manual_seed(0)
    block, hidden = Shared(elsewhere), torch.randn(2, 5, 8)
    (group,) = observe_block(block, hidden, {}, 2)
    assert (group.layers, group.producer) == (["up", "gate"], "norm")
    assert group.read_elsewhere is expected
    assert (find_fold(block, group) is None) is expected


def test_a_router_of_its_own_keeps_a_norm_as_it_is():
    """GPT-OSS and others: the router is no linear layer, and reads what the experts read."""
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_attention_heads=4)
    block = LlamaDecoderLayer(config, layer_idx=0).eval()
    mlp = block.mlp.forward
    weight = torch.randn(64, generator=torch.Generator().manual_seed(0))
    block.mlp.forward = lambda x: mlp(x) * torch.sigmoid(x @ weight)[..., None]
    hidden, positions = torch.randn(1, 6, 64), torch.arange(6)[None]
    arguments = {"position_embeddings": LlamaRotaryEmbedding(config)(hidden, positions)}
    groups = observe_block(block, hidden, arguments, 1)
    found = {group.layers[0]: group.read_elsewhere for group in groups}
    assert found == {
        "self_attn.q_proj": False,
        "self_attn.o_proj": False,
        "mlp.gate_proj": True,
        "mlp.down_proj": False,
    }
