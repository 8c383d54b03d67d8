"""What is stored reads back, and other readers of the format agree."""

from __future__ import annotations

import itertools

import pytest
import torch

from taut_deploy.compress.formats.config import quantization_config
from taut_deploy.compress.formats.registry import FORMATS, weight_format
from taut_deploy.compress.quantize.grid import QuantizedWeight
from taut_deploy.recipe import Quantize
from taut_deploy.recipe.schemes import SCHEMES
from taut_kernels.gemm.w4a16.disk import unpack_weight, unpack_zero_point

W4A16 = weight_format(Quantize(scheme="W4A16", group_size="channel"), [64], torch.bfloat16)
W8A8 = weight_format(Quantize(scheme="W8A8"), [64], torch.bfloat16)


def test_every_scheme_a_recipe_may_name_has_a_format():
    assert FORMATS.keys() == SCHEMES.keys()


def random_weight(n: int, k: int, groups: int, *, zeros: bool, bits: int = 4) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(n * 1000 + k * 10 + groups)
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (n, k), generator=generator, dtype=torch.int8)
    zero = torch.randint(-8, 8, (n, groups), generator=generator, dtype=torch.int8)
    scale = torch.rand(n, groups, generator=generator).bfloat16() + 0.1
    return QuantizedWeight(codes, scale, zero if zeros else None)


def assert_same(got: QuantizedWeight, want: QuantizedWeight) -> None:
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.scale, want.scale)
    assert (got.zero is None) == (want.zero is None)
    if want.zero is not None and got.zero is not None:
        assert torch.equal(got.zero, want.zero)


@pytest.mark.parametrize("zeros", [True, False])
def test_four_bit_layers_read_back_at_every_small_size(zeros):
    for n, groups, group in itertools.product(range(1, 19), range(1, 5), (2, 8, 32)):
        weight = random_weight(n, groups * group, groups, zeros=zeros)
        stored = W4A16.pack(weight)
        assert_same(W4A16.unpack(stored), weight)
        # The kernels' own reader of the same layout agrees with the library's.
        assert torch.equal(unpack_weight(stored["weight_packed"], groups * group), weight.codes)
        if weight.zero is not None:
            assert torch.equal(unpack_zero_point(stored["weight_zero_point"], n), weight.zero)


def test_every_code_and_every_neighbour_survives():
    pairs = torch.tensor(list(itertools.product(range(-8, 8), repeat=2)), dtype=torch.int8)
    weight = QuantizedWeight(pairs.view(8, 64), torch.ones(8, 1), None)
    assert_same(W4A16.unpack(W4A16.pack(weight)), weight)


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_layers_of_other_widths_read_back_through_the_librarys_compressor(bits, symmetric):
    from compressed_tensors.compressors import BaseCompressor

    asked = Quantize(scheme=f"W{bits}A16", group_size=32, symmetric=symmetric)
    found = weight_format(asked, [96], torch.bfloat16)
    values = torch.randn(7, 96, generator=torch.Generator().manual_seed(bits))
    codes = found.spec.fit(values).encode(values)
    stored = found.pack(codes)
    assert_same(found.unpack(stored), codes)
    library = BaseCompressor.get_value_from_registry("pack-quantized")
    theirs = library.decompress(stored, found.scheme(["Linear"]))["weight"]
    # It multiplies in the scales' dtype, two or three digits.
    torch.testing.assert_close(codes.dequantize(), theirs.float(), rtol=8e-3, atol=0)
    size = sum(tensor.nbytes for tensor in stored.values())
    assert found.stored_bytes(7, 96) == size


def test_fp8_layers_are_those_of_the_librarys_compressor():
    from compressed_tensors.compressors import BaseCompressor

    found = weight_format(Quantize(scheme="FP8"), [64], torch.float32)
    values = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    values[3] = 0.0
    codes = found.spec.fit(values).encode(values)
    stored, scheme = found.pack(codes), found.scheme(["Linear"])
    library = BaseCompressor.get_value_from_registry("float-quantized")
    theirs = library.compress({"weight": values, "weight_scale": codes.scale}, scheme)
    assert torch.equal(theirs["weight"].float(), stored["weight"].float())
    read = library.decompress(stored, scheme)["weight"]
    assert torch.equal(read, codes.dequantize())
    assert found.stored_bytes(5, 64) == sum(tensor.nbytes for tensor in stored.values())


def test_eight_bit_layers_are_stored_as_they_are():
    weight = random_weight(5, 12, 1, zeros=False, bits=8)
    stored = W8A8.pack(weight)
    assert sorted(stored) == ["weight", "weight_scale"]
    assert_same(W8A8.unpack(stored), weight)


@pytest.mark.parametrize("symmetric", [True, False])
def test_dequantised_values_are_those_of_compressed_tensors(symmetric):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    weight = random_weight(6, 64, 2, zeros=not symmetric)
    scale, zero = weight.scale.float(), weight.zero
    arguments = QuantizationArgs(num_bits=4, strategy="group", group_size=32, symmetric=symmetric)
    theirs = dequantize(weight.codes, scale, zero, arguments, dtype=torch.float32)
    torch.testing.assert_close(weight.dequantize(), theirs, rtol=0, atol=1e-6)


def test_the_configuration_says_what_is_stored():
    w4 = Quantize(scheme="W4A16", group_size=128, symmetric=False)
    found = weight_format(w4, [64, 192], torch.bfloat16)
    config = quantization_config({"a": found, "b": found}, {}, ["lm_head"])
    assert config["quant_method"] == "compressed-tensors"
    assert config["format"] == "pack-quantized"
    assert config["ignore"] == ["lm_head"]
    group = config["config_groups"]["group_0"]
    weights = group["weights"]
    found = (weights["num_bits"], weights["strategy"], weights["group_size"], weights["symmetric"])
    assert found == (4, "group", 64, False), "the group size that was used, not the one asked for"
    assert "input_activations" not in group

    assert group["targets"] == ["Linear"]

    config = quantization_config({"a": W8A8}, {}, [])
    assert config["format"] == "int-quantized"
    group = config["config_groups"]["group_0"]
    assert (group["weights"]["num_bits"], group["weights"]["strategy"]) == (8, "channel")
    activations = group["input_activations"]
    found = (activations["num_bits"], activations["strategy"], activations["dynamic"])
    assert found == (8, "token", True)
