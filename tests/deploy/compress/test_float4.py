"""FP4 grids against all sixteen numbers, and the readers of what is packed."""

from __future__ import annotations

import itertools

import pytest
import torch
from stood_for import (
    assert_joined_layers_share,
    dequantised_model,
    layers_seen,
    logits_of,
    scales_of,
)
from tiny_models import job_for, recipe_data, write_calibration_text, write_llama
from transformers import AutoModelForCausalLM

from taut_deploy.compress import driver
from taut_deploy.compress.formats.registry import weight_format
from taut_deploy.compress.quantize import gptq
from taut_deploy.compress.quantize.float4 import Float4Spec, Float4Weight, round_fp4
from taut_deploy.errors import RecipeError
from taut_deploy.recipe import Quantize
from taut_deploy.validate.checkpoint_source import CheckpointSource

# One bit of fraction, two of exponent around 1; below 1 the step stays a half.
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NVFP4 = Float4Spec(16, powers_of_two=False)
MXFP4 = Float4Spec(32, powers_of_two=True)
SPECS = pytest.mark.parametrize("spec", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
SCHEMES = pytest.mark.parametrize("scheme", ["NVFP4A16", "MXFP4A16"])


def uneven(n: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n * k)
    return torch.randn(n, k, generator=generator) * torch.logspace(-2, 1, n)[:, None]


def nearest(values: torch.Tensor) -> torch.Tensor:
    """Of all sixteen numbers the nearest."""
    signed = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)])
    return signed[(values.unsqueeze(-1) - signed).abs().argmin(-1)]


def test_rounding_takes_the_nearest_of_all_numbers_and_of_two_the_even_one():
    values = torch.linspace(-8, 8, 1000)  # none of them in the middle of two
    assert torch.equal(round_fp4(values), nearest(values))
    middles = [(a + b) / 2 for a, b in itertools.pairwise(NUMBERS)]
    # Even are the numbers whose one bit of fraction is zero.
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert round_fp4(torch.tensor(middles)).tolist() == even
    assert round_fp4(torch.tensor([torch.nan])).isnan().all()


def best_scale_by_hand(group: torch.Tensor, scales: list[float]) -> float:
    """The least squared error any scale can give one group."""
    return min(float((nearest(group / s) * s - group).square().sum()) for s in scales)


@SPECS
def test_the_scale_is_the_best_there_is(spec):
    weight = uneven(8, 64)
    codes = spec.fit(weight).encode(weight)
    if spec.powers_of_two:
        candidates = [2.0**e for e in range(-30, 10)]
    else:
        every = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        candidates = (every / codes.global_scale).tolist()
    error = (codes.dequantize() - weight).square().view(8, -1, spec.group_size).sum(-1)
    for row, group in itertools.product(range(8), range(error.shape[1])):
        values = weight[row, group * spec.group_size : (group + 1) * spec.group_size]
        assert error[row, group] <= 1.0001 * best_scale_by_hand(values, candidates)


@SPECS
def test_columns_are_rounded_as_the_whole_and_error_feedback_helps(spec):
    weight = uneven(16, 64)
    grid = spec.fit(weight)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    rounding, whole = grid.by_column(order), grid.round(weight)
    for position, column in enumerate(order.tolist()):
        assert torch.equal(rounding(position, weight[:, column]), whole[:, column])
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    x = x @ torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    fed_back = gptq.quantize_weight(weight, gptq.feedback_of(x.T @ x / 256), spec).dequantize()
    assert (x @ (fed_back - weight).T).norm() < 0.8 * (x @ (whole - weight).T).norm()


@SPECS
def test_groups_of_zeros_and_of_tiny_weights_are_finite(spec):
    weight = uneven(4, 64)
    weight[1, :32] = 0.0
    weight[2, 32:] = 1e-30
    weight[3] = 0.0
    codes = spec.fit(weight).encode(weight).dequantize()
    assert codes.isfinite().all()
    assert (codes[1, :32] == 0).all()
    assert (codes[3] == 0).all()
    none = torch.zeros(2, 32)
    assert torch.equal(spec.fit(none).encode(none).dequantize(), none)


@SCHEMES
def test_the_library_packs_the_same_bytes_and_reads_them(scheme):
    from compressed_tensors.compressors import BaseCompressor

    found = weight_format(Quantize(scheme=scheme), [96], torch.bfloat16)
    weight = uneven(7, 96)
    codes = found.spec.fit(weight).encode(weight)
    packed, group = found.pack(codes), found.scheme(["Linear"])
    library = BaseCompressor.get_value_from_registry(group.format)
    read = library.decompress(packed, group)["weight"]
    # Its result is bf16, which holds every product of such a code and scale exactly.
    assert torch.equal(read.float(), codes.dequantize())
    back = found.unpack(packed)
    assert isinstance(back, Float4Weight)
    assert torch.equal(back.dequantize(), codes.dequantize())
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    # (It gives zeros a sign where the number was a negative zero; ours never is.)
    assert torch.equal(packed["weight_packed"], pack_fp4_to_uint8(codes.halves.float() / 2))
    assert found.stored_bytes(7, 96) == sum(tensor.nbytes for tensor in packed.values())


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/`` and ``text.txt``."""
    path = tmp_path_factory.mktemp("room")
    write_llama(path / "model", dtype=torch.bfloat16)
    write_calibration_text(path / "text.txt")
    return path


@SCHEMES
def test_stock_transformers_computes_what_the_checkpoint_stands_for(scheme, room, tmp_path):
    data = recipe_data(room / "text.txt", scheme=scheme, group_size=None)
    request = job_for(room / "model", data, tmp_path / "out")
    manifest = driver.compress(request)
    assert (manifest.scheme, manifest.bits) == (scheme, 4)
    seen = layers_seen(tmp_path / "out")["model.layers.0.mlp.down_proj"]
    assert (seen[:2], seen[2].name) == ((64, 128), scheme)
    # The weights are exact in bf16, so that both multiply the same numbers.
    model = dequantised_model(request)
    for parameter in model.parameters():  # not the rotation's frequencies, which stay fp32
        parameter.data = parameter.data.bfloat16()
    ours = logits_of(model)
    theirs = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval())
    base = logits_of(AutoModelForCausalLM.from_pretrained(room / "model").eval())
    lost = (ours - base).norm()
    assert 0 < lost < 0.5 * base.norm()
    assert torch.equal(theirs, ours)
    if scheme == "NVFP4A16":
        assert_joined_layers_share(scales_of(tmp_path / "out", "weight_global_scale"))


def test_the_global_scale_of_joined_layers_suits_the_largest_of_them():
    small, large = uneven(4, 32) * 1e-3, uneven(4, 32) * 10
    joined = NVFP4.joined([small, large])
    assert float(joined.fit(small).global_scale) == float(joined.fit(large).global_scale)
    assert float(NVFP4.fit(small).global_scale) > float(NVFP4.fit(large).global_scale)
    error = (joined.fit(large).round(large) - large).norm()
    assert error == (NVFP4.fit(large).round(large) - large).norm()
    assert MXFP4.joined([small, large]) == MXFP4


def test_a_layer_that_groups_do_not_divide_is_refused_by_name(room, tmp_path):
    model = write_llama(tmp_path / "model", intermediate=136, dtype=torch.bfloat16)
    data = recipe_data(room / "text.txt", scheme="NVFP4A16", group_size=None)
    with pytest.raises(RecipeError, match=r"down_proj \[64, 136\].*groups of 16 do not divide"):
        driver.plan(job_for(model, data, tmp_path / "out"))


def test_models_of_another_type_are_refused_in_the_plan(room, tmp_path):
    model = write_llama(tmp_path / "model", dtype=torch.float16)
    data = recipe_data(room / "text.txt", scheme="MXFP4A16", group_size=None)
    with pytest.raises(
        RecipeError, match="MXFP4A16 is for models in bfloat16, this one is in float16"
    ):
        driver.plan(job_for(model, data, tmp_path / "out"))


@SCHEMES
def test_a_validation_computes_in_the_type_it_was_asked_for(scheme, room, tmp_path):
    data = recipe_data(room / "text.txt", scheme=scheme, group_size=None)
    driver.compress(job_for(room / "model", data, tmp_path / "out"))
    own, wide = (
        CheckpointSource(tmp_path / "out", "candidate", "cpu", dtype).score([2, 3, 5, 7]).logits
        for dtype in (None, torch.float32)
    )
    assert (own.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert 0 < (own - wide).norm() < 0.02 * wide.norm()
