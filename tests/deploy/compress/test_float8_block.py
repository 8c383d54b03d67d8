"""FP8 in blocks of 128×128: the arithmetic, the library's reading of it, what cannot have it."""

from __future__ import annotations

import pytest
import torch
from stood_for import dequantised_model, layers_seen, logits_of
from tiny_models import job_for, recipe_data, write_calibration_text, write_llama
from transformers import AutoModelForCausalLM

from taut_deploy.compress import driver
from taut_deploy.compress.formats.activations import Float8Dynamic
from taut_deploy.compress.formats.registry import weight_format
from taut_deploy.compress.quantize import gptq
from taut_deploy.compress.quantize.float8 import Float8Spec
from taut_deploy.errors import RecipeError
from taut_deploy.recipe import Quantize


def uneven(n: int, k: int) -> torch.Tensor:
    """A weight whose blocks differ in size by far."""
    generator = torch.Generator().manual_seed(n + k)
    rows, columns = torch.logspace(-2, 2, n)[:, None], torch.logspace(1, -1, k)
    return torch.randn(n, k, generator=generator) * rows * columns


def block_by_block(weight: torch.Tensor, side: int, scale_dtype: torch.dtype) -> torch.Tensor:
    """Each block divided by its own largest value over 448, rounded by torch's cast."""
    result = torch.empty_like(weight)
    for i in range(0, weight.shape[0], side):
        for j in range(0, weight.shape[1], side):
            block = weight[i : i + side, j : j + side]
            scale = (block.abs().max() / 448).to(scale_dtype).float()
            codes = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            result[i : i + side, j : j + side] = codes.float() * scale
    return result


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_each_block_is_rounded_by_its_own_largest_value(scale_dtype):
    weight = uneven(8, 12)
    grid = Float8Spec(scale_dtype, block=4).fit(weight)
    assert grid.scale.shape == (2, 3)
    expected = block_by_block(weight, 4, scale_dtype)
    assert torch.equal(grid.round(weight), expected)
    assert torch.equal(grid.encode(weight).dequantize(), expected)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    rounding = grid.by_column(order)
    for position, column in enumerate(order.tolist()):
        assert torch.equal(rounding(position, weight[:, column]), expected[:, column])


def test_a_block_of_zeros_stays_zero():
    weight = uneven(8, 8)
    weight[:4, 4:] = 0.0
    codes = Float8Spec(torch.bfloat16, block=4).fit(weight).encode(weight)
    assert torch.equal(codes.dequantize()[:4, 4:], torch.zeros(4, 4))
    assert codes.scale.isfinite().all()


def test_error_feedback_goes_through_blocks():
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))
    x = x @ torch.randn(32, 32, generator=torch.Generator().manual_seed(2))
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(4))
    spec = Float8Spec(torch.float32, block=8)
    fed_back = gptq.quantize_weight(weight, gptq.feedback_of(x.T @ x / 256), spec).dequantize()
    plain = spec.fit(weight).round(weight)
    assert (x @ (fed_back - weight).T).norm() < 0.9 * (x @ (plain - weight).T).norm()


def test_inputs_are_rounded_in_groups_of_a_token():
    x = uneven(3, 256).view(1, 3, 256)
    got = Float8Dynamic(128).round(x)
    for token in range(3):
        for start in (0, 128):
            group = x[0, token, start : start + 128]
            scale = group.abs().max() / 448
            expected = (group / scale).to(torch.float8_e4m3fn).float() * scale
            assert torch.equal(got[0, token, start : start + 128], expected)


def test_the_library_reads_the_stored_blocks():
    from compressed_tensors.compressors import BaseCompressor

    found = weight_format(Quantize(scheme="FP8-BLOCK"), [384], torch.float32)
    codes = found.spec.fit(uneven(256, 384)).encode(uneven(256, 384))
    stored, scheme = found.pack(codes), found.scheme(["Linear"])
    library = BaseCompressor.get_value_from_registry("float-quantized")
    read = library.decompress(stored, scheme)["weight"]
    assert torch.equal(read, codes.dequantize())
    assert found.stored_bytes(256, 384) == sum(tensor.nbytes for tensor in stored.values())


def test_a_layer_that_blocks_do_not_divide_is_refused_by_name(tmp_path):
    model = write_llama(tmp_path / "model")
    text = write_calibration_text(tmp_path / "text.txt")
    data = recipe_data(text, scheme="FP8-BLOCK", group_size=None)
    message = r"layers\.0\.self_attn\.q_proj \[64, 64\] .*blocks of 128 do not divide its output"
    with pytest.raises(RecipeError, match=message):
        driver.plan(job_for(model, data, tmp_path / "out"))
    found = weight_format(Quantize(scheme="FP8-BLOCK"), [], torch.float32)
    assert "whole input" in str(found.why_not(256, 128))
    assert "do not divide its input of 192" in str(found.why_not(256, 192))
    assert found.why_not(128, 256) is None


def test_stock_transformers_computes_what_the_checkpoint_stands_for(tmp_path):
    model = write_llama(tmp_path / "model", hidden=256, intermediate=384, layers=1)
    text = write_calibration_text(tmp_path / "text.txt")
    data = recipe_data(text, scheme="FP8-BLOCK", group_size=None, algorithm="rtn")
    request = job_for(model, data, tmp_path / "out")
    driver.compress(request)
    seen = layers_seen(tmp_path / "out")["model.layers.0.mlp.down_proj"]
    assert (seen[:2], seen[2].name) == ((256, 384), "FP8 by blocks")
    ours = logits_of(dequantised_model(request))
    theirs = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval())
    base = logits_of(AutoModelForCausalLM.from_pretrained(model).eval())
    lost = (ours - base).norm()
    assert 0 < lost < 0.3 * base.norm()
    assert (theirs - ours).norm() < 0.02 * lost
