"""Models that come in low precision: compressed as if their numbers had been written out."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stood_for import plain_copy
from tiny_families import MOE
from tiny_models import (
    edit_json,
    job_for,
    recipe_data,
    w8a8_data,
    write_calibration_text,
    write_llama,
)
from transformers import AutoConfig, AutoModelForCausalLM
from validate_setup import write_tokenizer

from taut_deploy.compress import driver
from taut_deploy.compress.source.packed import unpack_mxfp4
from taut_deploy.errors import ModelError

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_calibration_text(tmp_path_factory.mktemp("room") / "text.txt")


def change(model: Path, edit) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def require_equal_checkpoints(first: Path, second: Path) -> None:
    names = sorted(path.name for path in first.glob("*.safetensors"))
    assert names == sorted(path.name for path in second.glob("*.safetensors"))
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    configs = [
        {key: value for key, value in json.loads(file.read_text()).items() if value is not None}
        for file in (first / "config.json", second / "config.json")
    ]
    assert configs[0] == configs[1]


def two_writings(tmp_path: Path) -> tuple[Path, Path]:
    """One bf16 model with its linear layers in FP8 by blocks, and with them multiplied out."""
    packed, plain = (
        write_llama(tmp_path / name, dtype=torch.bfloat16, intermediate=144)
        for name in ("packed", "plain")
    )

    def pack(tensors):
        for name in [name for name in tensors if "proj" in name]:
            tensors[name], tensors[f"{name}_scale_inv"] = by_blocks(tensors[name])

    def write_out(tensors):
        for name in [name for name in tensors if "proj" in name]:
            codes, scale = by_blocks(tensors[name])
            exact = codes.double()
            for i in range(scale.shape[0]):
                for j in range(scale.shape[1]):
                    exact[32 * i : 32 * i + 32, 32 * j : 32 * j + 32] *= scale[i, j].double()
            tensors[name] = exact.bfloat16()

    change(packed, pack)
    change(plain, write_out)
    edit_json(packed / "config.json", quantization_config=FP8)
    return packed, plain


def by_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (math.ceil(side / 32) for side in weight.shape)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            place = (slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32))
            block = weight[place].float()
            scale[i, j] = block.abs().max() / 448
            codes[place] = (block / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale


@pytest.mark.parametrize("recipe", [recipe_data, w8a8_data])
def test_fp8_by_blocks_is_read_as_its_numbers(recipe, text, tmp_path):
    packed, plain = two_writings(tmp_path)
    data = recipe(text)
    data["stages"][-1]["ignore"] = ["*.down_proj"]  # 144 inputs: dense, so written out
    for model in (packed, plain):
        driver.compress(job_for(model, data, tmp_path / f"{model.name}-out"))
    require_equal_checkpoints(tmp_path / "packed-out", tmp_path / "plain-out")


def test_fp8_whose_scales_do_not_fit_is_refused(text, tmp_path):
    packed, _ = two_writings(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    change(packed, lambda tensors: tensors.update({name: torch.ones(2, 2)}))
    with pytest.raises(ModelError, match=rf"{name}: stored shape \(2, 2\) does not fit blocks"):
        driver.plan(job_for(packed, recipe_data(text), tmp_path / "out"))
    change(packed, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=r"up_proj\.weight is stored as F8_E4M3"):
        driver.plan(job_for(packed, recipe_data(text), tmp_path / "out"))


def test_mxfp4_codes_are_unpacked_one_by_one():
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 3, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 134, (2, 3, 2), dtype=torch.uint8, generator=generator)
    found = unpack_mxfp4(blocks, scales)
    assert found.shape == (2, 64, 3)
    for e in range(2):
        for n in range(3):
            for k in range(64):
                byte = int(blocks[e, n, k // 32, k % 32 // 2])
                code = byte >> 4 if k % 2 else byte & 15
                value = E2M1[code & 7] * (-1 if code & 8 else 1)
                assert found[e, k, n] == value * 2.0 ** (int(scales[e, n, k // 32]) - 127)


def test_a_gpt_oss_in_mxfp4_is_read_as_its_numbers(text, tmp_path):
    config = AutoConfig.for_model("gpt_oss", **MOE, head_dim=16)
    generator = torch.Generator().manual_seed(1)
    for name in ("packed", "plain"):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
            tmp_path / name
        )
        write_tokenizer(tmp_path / name)
    packed_tensors, plain_tensors = {}, {}
    for name, value in load_file(tmp_path / "plain" / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, k, n = value.shape
            shape = (experts, n, k // 32, 16)
            blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            scales = torch.randint(119, 124, shape[:3], dtype=torch.uint8, generator=generator)
            packed_tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain_tensors[name] = unpack_mxfp4(blocks, scales)
        else:
            packed_tensors[name] = plain_tensors[name] = value
    for name, tensors in (("packed", packed_tensors), ("plain", plain_tensors)):
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    edit_json(tmp_path / "packed" / "config.json", quantization_config={"quant_method": "mxfp4"})
    for name in ("packed", "plain"):
        driver.compress(job_for(tmp_path / name, recipe_data(text), tmp_path / f"{name}-out"))
    require_equal_checkpoints(tmp_path / "packed-out", tmp_path / "plain-out")


@pytest.mark.parametrize("first", [{"symmetric": False}, {"scheme": "W8A16", "algorithm": "rtn"}])
def test_a_quantised_model_is_compressed_again_only_when_asked_for(first, text, tmp_path):
    model = write_llama(tmp_path / "model")
    driver.compress(job_for(model, recipe_data(text, **first), tmp_path / "first"))
    again = job_for(tmp_path / "first", recipe_data(text), tmp_path / "again-out")
    with pytest.raises(ModelError, match=r"quantised already .* or add --requantize"):
        driver.plan(again)
    driver.compress(dataclasses.replace(again, requantize=True))
    bits = 8 if first.get("scheme") == "W8A16" else 4
    plain = plain_copy(tmp_path / "first", tmp_path / "plain", bits, turned=False)
    driver.compress(job_for(plain, recipe_data(text), tmp_path / "plain-out"))
    require_equal_checkpoints(tmp_path / "again-out", tmp_path / "plain-out")


@pytest.mark.parametrize("scheme", ["W8A8", "FP8", "FP8-STATIC"])
def test_codes_of_8_bits_are_compressed_again(scheme, text, tmp_path):
    model = write_llama(tmp_path / "model")
    data = recipe_data(text, scheme=scheme, group_size=None, algorithm="rtn")
    driver.compress(job_for(model, data, tmp_path / "first"))
    again = job_for(tmp_path / "first", data, tmp_path / "out")
    driver.compress(dataclasses.replace(again, requantize=True))
    for shard in (tmp_path / "first").glob("model-*.safetensors"):
        before, after = load_file(shard), load_file(tmp_path / "out" / shard.name)
        assert before.keys() == after.keys()
        for name in before:
            if name.endswith("proj.weight"):
                changed = (before[name].float() != after[name].float()).float().mean()
                assert changed < 0.01, "what is on the grid stays where it is"


def test_other_methods_are_refused(text, tmp_path):
    model = write_llama(tmp_path / "model")
    edit_json(model / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    request = dataclasses.replace(
        job_for(model, recipe_data(text), tmp_path / "out"), requantize=True
    )
    with pytest.raises(ModelError, match=r"quantised already \(gptq\); compress the model it was"):
        driver.plan(request)
