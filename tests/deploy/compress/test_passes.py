"""How often weights are read, and what is worked on at a time: no more than is needed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import job_for, recipe_data, write_calibration_text, write_llama
from torch import nn
from transformers import LlamaConfig

from taut_deploy.compress import driver
from taut_deploy.compress.calibrate.observe import unobserved
from taut_deploy.compress.formats.activations import Activations
from taut_deploy.compress.formats.float8 import Float8Format
from taut_deploy.compress.quantize import scales
from taut_deploy.compress.quantize.float8 import FP8, FP8_MAX, Float8Spec, Float8Weight, from_fp8
from taut_deploy.compress.quantize.grid import GridSpec
from taut_deploy.compress.quantize.rtn import quantize_weight
from taut_deploy.compress.skeleton import empty_model
from taut_deploy.compress.source import weights
from taut_deploy.compress.state import LayerState

BF16 = torch.bfloat16


def test_every_e4m3_number_is_widened_as_torch_does() -> None:
    codes = torch.arange(256).to(torch.uint8).view(FP8)
    numbers = codes.float()
    told = ~numbers.isnan()
    assert int(told.sum()) == 254
    assert torch.equal(from_fp8(codes)[told], numbers[told])


@pytest.mark.parametrize(
    "spec",
    [
        GridSpec(4, 32, True, BF16),
        GridSpec(4, 32, False, BF16),
        GridSpec(8, None, True, BF16),
        Float8Spec(BF16),
        Float8Spec(torch.float32, block=32),
    ],
)
def test_rows_at_a_time_give_what_all_at_once_do(spec, monkeypatch) -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    found = []
    for cached in (1 << 17, 640):
        monkeypatch.setattr(scales, "_CACHED", cached)
        codes = quantize_weight(weight, spec)
        assert torch.equal(codes.dequantize(), quantize_weight(weight.float(), spec).dequantize())
        found.append(codes)
    assert len(list(scales.row_slices(weight))) == 10
    assert torch.equal(found[0].dequantize(), found[1].dequantize())
    assert torch.equal(found[0].scale, found[1].scale)


def test_channels_of_fp8_are_the_nearest_numbers() -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    scale = (weight.abs().amax(1, keepdim=True) / FP8_MAX).to(BF16)
    wanted = (weight / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale.float()
    assert torch.equal(quantize_weight(weight, Float8Spec(BF16)).dequantize(), wanted)


def test_rows_are_worked_on_by_one_thread_and_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert [torch.get_num_threads() for _ in scales.row_slices(torch.zeros(8, 1 << 16))] == [
            1
        ] * 4
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def stored_layer() -> tuple[LayerState, Float8Weight]:
    block = nn.ModuleDict({"up": nn.Linear(64, 96, bias=False)})
    module = block["up"]
    assert isinstance(module, nn.Linear)
    spec = Float8Spec(torch.float32)
    layer = LayerState("up", module, unobserved(block)[0], frozenset({0}), None)
    codes = quantize_weight(module.weight.data, spec)
    layer.store(Float8Format("FP8", spec, Activations()).store(codes, torch.ones(64)), "rtn")
    return layer, codes


@pytest.mark.parametrize("called_in", [torch.float32, BF16])
def test_a_stored_layer_stands_for_its_codes_whatever_its_block_was_called_in(called_in) -> None:
    layer, codes = stored_layer()
    layer.module.to(called_in)
    assert torch.equal(layer.stored_weight(), codes.dequantize())


def test_what_does_not_read_back_is_seen() -> None:
    stored = stored_layer()[0].stored
    assert stored is not None
    written = stored.tensors()
    assert stored.reads_back({name: tensor.clone() for name, tensor in written.items()})
    for name, tensor in written.items():
        other = tensor.clone()
        other.view(torch.uint8)[0, 0] ^= 1
        assert not stored.reads_back({**written, name: other}), name


def test_golden_prompts_read_no_weight_that_a_stored_one_replaces(tmp_path, monkeypatch) -> None:
    write_llama(tmp_path / "model", layers=3, shard_bytes=200_000)
    write_calibration_text(tmp_path / "text.txt")
    read, opened = Counter[str](), Counter[str]()
    plain, opens = weights.WeightReader.read, weights.safe_open

    def counted(self, name, entry=None):
        read[name] += 1
        return plain(self, name, entry)

    def counted_open(path, **options):
        opened[Path(path).name] += 1
        return opens(path, **options)

    data = recipe_data(tmp_path / "text.txt", scheme="FP8", group_size=None, algorithm="rtn")
    job = replace(job_for(tmp_path / "model", data, tmp_path / "out"), workers=1)
    monkeypatch.setattr(weights.WeightReader, "read", counted)
    monkeypatch.setattr(weights, "safe_open", counted_open)
    driver.compress(job)
    linear = "model.layers.2.mlp.up_proj.weight"
    assert read[linear] == 1  # its values are checked; another process compresses it
    assert read["model.layers.2.input_layernorm.weight"] == 2
    # A shard is opened for its header, and again as the model is gone through, not for each tensor.
    assert max(opened.values()) < max(8, sum(read.values()) / 4)


def test_a_skeleton_reserves_no_room_for_its_weights() -> None:
    def config_of(width: int, layers: int) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=16,
            vocab_size=64,
            architectures=["LlamaForCausalLM"],
        )

    def reserved() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(one.split()[1]) for one in lines if one.startswith("VmData"))

    empty_model(config_of(64, 1), BF16)  # what the libraries import on the way
    torch.empty(30 << 20, dtype=torch.uint8)  # glibc's heap takes what is smaller from here on
    before = reserved()
    model = empty_model(config_of(1024, 24), BF16)
    size = sum(one.numel() * one.itemsize for one in model.parameters())
    print(f"{(reserved() - before) / 1e6:.1f} MB for a model of {size / 1e6:.0f} MB")
    assert reserved() - before < 0.05 * size
    assert all(one.is_meta for one in model.parameters())
    assert not any(one.is_meta for one in model.buffers())
