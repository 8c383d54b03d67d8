"""Directories: what transformers computes for compressed-tensors checkpoints, and what is
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from validate_setup import MODULES, perturb, rewrite, write_model

from taut_deploy.validate import CouldNotValidateError
from taut_deploy.validate.checkpoint_source import CheckpointSource, usable_device, wider_dtype

IDS = tuple(range(2, 42))
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True}


def quantization_config(fmt: str, **scheme: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], **scheme}},
    }


def is_quantized(name: str) -> bool:
    return name.endswith(tuple(f"{module}.weight" for module in MODULES))


def write_w8a8(source: Path, target: Path) -> Path:
    """Per-channel int8 weights, dynamic per-token int8 activations, written by hand."""

    def quantize(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = {}
        for name, tensor in tensors.items():
            if not is_quantized(name):
                result[name] = tensor
                continue
            scale = tensor.abs().amax(1, keepdim=True) / 127
            result[name] = (tensor / scale).round().to(torch.int8)
            result[f"{name}_scale"] = scale
        return result

    config = quantization_config(
        "int-quantized",
        weights=INT8 | {"strategy": "channel", "dynamic": False},
        input_activations=INT8 | {"strategy": "token", "dynamic": True},
    )
    return rewrite(source, target, quantize, quantization_config=config)


def pack(q: torch.Tensor) -> torch.Tensor:
    """Eight values of -8..7 a word, each stored plus 8, the first in the lowest bits."""
    words = torch.zeros(q.shape[0], q.shape[1] // 8, dtype=torch.int64)
    for i in range(8):
        words |= (q[:, i::8].long() + 8) << (4 * i)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def write_w4a16(source: Path, target: Path) -> Path:
    """Symmetric int4 weights in groups of 16, written and packed by hand."""

    def quantize(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = {}
        for name, tensor in tensors.items():
            if not is_quantized(name):
                result[name] = tensor
                continue
            groups = tensor.view(tensor.shape[0], -1, 16)
            scale = groups.abs().amax(-1) / 7
            q = (groups / scale[..., None]).round().view_as(tensor)
            result[f"{name}_packed"] = pack(q)
            result[f"{name}_scale"] = scale
            result[f"{name}_shape"] = torch.tensor(tensor.shape)
        return result

    config = quantization_config(
        "pack-quantized", weights=INT4 | {"strategy": "group", "group_size": 16, "dynamic": False}
    )
    return rewrite(source, target, quantize, quantization_config=config)


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """Symmetric int8, one scale per token: compressed-tensors divides the largest value by
    127.5."""
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


def own_logits(
    source: Path, weights: dict[str, torch.Tensor], *, activations: bool
) -> torch.Tensor:
    """The dense model with our dequantised weights and, if asked, our activation rounding before
    each of them."""
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    for name, module in model.named_modules():
        if f"{name}.weight" in weights:
            module.weight.data.copy_(weights[f"{name}.weight"])
            if activations:
                module.register_forward_pre_hook(
                    lambda _module, args: (round_activations(args[0]),)
                )
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0, :-1]


def test_w8a8_rounds_weights_and_activations_as_it_is_served(tmp_path):
    dense = write_model(tmp_path / "dense")
    stored = load_file(write_w8a8(dense, tmp_path / "w8a8") / "model.safetensors")
    weights = {n: stored[n] * stored[f"{n}_scale"] for n in stored if is_quantized(n)}
    source = CheckpointSource(tmp_path / "w8a8", "candidate", "cpu")
    logits = source.score(IDS).logits

    assert len(weights) == 14
    expected = own_logits(dense, weights, activations=True)
    weights_only = own_logits(dense, weights, activations=False)
    # A value on a rounding edge may fall either way in fp32, so a few logits move by one
    # quantisation step.
    assert (logits - expected).abs().median() < 1e-5
    assert (logits - weights_only).abs().median() > 1e-3
    assert torch.equal(source.score(IDS).logits, logits), (
        "the first pass, which unpacks, is no special case"
    )


def test_w4a16_is_unpacked_to_the_values_stored(tmp_path):
    dense = write_model(tmp_path / "dense")
    write_w4a16(dense, tmp_path / "w4a16")
    stored = load_file(tmp_path / "w4a16" / "model.safetensors")
    weights = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        if is_quantized(name):
            scale = stored[f"{name}_scale"].repeat_interleave(16, dim=1)
            weights[name] = (tensor / scale).round() * scale
    source = CheckpointSource(tmp_path / "w4a16", "candidate", "cpu")

    expected = own_logits(dense, weights, activations=False)
    assert torch.allclose(source.score(IDS).logits, expected, atol=1e-5)
    assert not torch.allclose(expected, own_logits(dense, {}, activations=False), atol=1e-2)


def test_the_model_runs_in_the_type_it_is_stored_in(tmp_path):
    write_model(tmp_path / "m", dtype=torch.bfloat16)
    source = CheckpointSource(tmp_path / "m", "baseline", "cpu")
    assert source.dtype is torch.bfloat16
    assert source.score(IDS).logits.dtype is torch.bfloat16
    wide = CheckpointSource(tmp_path / "m", "baseline", "cpu", wider_dtype(source.dtype))
    assert wide.score(IDS).logits.dtype is torch.float32
    assert wider_dtype(torch.float32) is torch.float64


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_are_refused_by_model(tmp_path, value):
    write_model(tmp_path / "m")

    def break_one(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "model.norm.weight":
            tensor[0] = value
        return tensor

    broken = perturb(tmp_path / "m", tmp_path / "broken", break_one)
    with pytest.raises(CouldNotValidateError, match=r"model\.norm\.weight holds NaN") as caught:
        CheckpointSource(broken, "candidate", "cpu").score(IDS)
    assert str(caught.value).startswith(f"candidate {broken}")


def test_a_missing_tensor_is_refused_instead_of_filled_with_random_numbers(tmp_path):
    write_model(tmp_path / "m")
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(tmp_path / "m", tmp_path / "c", lambda t: {k: v for k, v in t.items() if k != name})
    with pytest.raises(CouldNotValidateError, match=f"1 missing tensors, the first is {name}"):
        CheckpointSource(tmp_path / "c", "candidate", "cpu")


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    write_model(tmp_path / "m")
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(tmp_path / "m", tmp_path / "c", lambda t: t | {name: t[name][:10].clone()})
    with pytest.raises(CouldNotValidateError, match=f"1 mismatched tensors, the first is {name}"):
        CheckpointSource(tmp_path / "c", "candidate", "cpu")


def test_a_truncated_shard_is_refused(tmp_path):
    write_model(tmp_path / "m")
    shard = tmp_path / "m" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(CouldNotValidateError, match=r"baseline .* cannot be loaded"):
        CheckpointSource(tmp_path / "m", "baseline", "cpu")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "sparse24"}, r"cannot compute quant_method 'sparse24'.*URL"),
        ({"quant_method": "taut", "layers": {}}, r"cannot be loaded: .*format_version is 'None'"),
    ],
)
def test_a_quantisation_nobody_here_knows_is_refused_not_ignored(config, message, tmp_path):
    write_model(tmp_path / "m")
    rewrite(tmp_path / "m", tmp_path / "c", dict, quantization_config=config)
    with pytest.raises(CouldNotValidateError, match=message):
        CheckpointSource(tmp_path / "c", "candidate", "cpu")


@pytest.mark.parametrize(
    ("config", "fragment"),
    [
        (None, "no config.json"),
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        (json.dumps({"model_type": "nonsense"}), "architecture 'nonsense' is not supported"),
    ],
)
def test_unusable_directories_are_refused_by_role(tmp_path, config, fragment):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(CouldNotValidateError) as caught:
        CheckpointSource(tmp_path, "candidate", "cpu")
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_token_outside_the_vocabulary_is_refused(tmp_path):
    write_model(tmp_path / "m")
    with pytest.raises(CouldNotValidateError, match="token 62 is outside its vocabulary of 62"):
        CheckpointSource(tmp_path / "m", "candidate", "cpu").score((1, 62))


@pytest.mark.parametrize("device", ["gpu", "cuda:99", ""])
def test_absent_devices_are_refused_by_flag(device):
    with pytest.raises(CouldNotValidateError, match="--device"):
        usable_device(device)
