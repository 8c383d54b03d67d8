"""Inputs of linear layers, rounded alone: beside a product by hand, and the table's order."""

from __future__ import annotations

import pytest
import torch
from tiny_models import write_llama
from transformers import AutoModelForCausalLM
from validate_setup import write_text

from taut_deploy.bench.input_rounding import kinds_of, losses, main, rounded
from taut_deploy.compress.formats.activations import Int8PerToken


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("room") / "model")


def test_the_blocks_layers_see_integers_of_their_token_and_the_head_does_not(model):
    loaded = AutoModelForCausalLM.from_pretrained(model)
    kinds = kinds_of(loaded)
    assert {kind: len(layers) for kind, layers in kinds.items()} == dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 2
    )
    layer = kinds["down_proj"][1]
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    with rounded([layer], Int8PerToken().round), torch.inference_mode():
        found = layer(x)
    step = x.abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(found, (x / step).round() * step @ layer.weight.T)
    torch.testing.assert_close(layer(x), x @ layer.weight.T, msg="as before")


def test_what_is_not_rounded_costs_nothing(model):
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    tokens = torch.arange(2, 34).reshape(2, 16)
    assert losses(loaded, tokens, kinds_of(loaded)["q_proj"], lambda x: x) == ([0, 0], [0, 0])
    kls, lost = losses(loaded, tokens, kinds_of(loaded)["q_proj"], lambda x: x * 1.5)
    assert min(kls) > 0
    assert all(abs(one) > 0 for one in lost)


def test_fp8_costs_more_than_int8_and_all_layers_more_than_a_kind(model, tmp_path, capsys):
    text = write_text(tmp_path / "b.txt", 400, seed=9)
    main([str(model), "--text", str(text), "--sequences", "6", "--sequence-length", "32"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    kl = {name: float(value) for name, value, _ in rows}
    assert len(kl) == 2 + 7
    assert 0 < kl["all, INT8"] < kl["all, FP8"]
    assert all(0 < kl[name] < kl["all, FP8"] for name in list(kl)[2:])
