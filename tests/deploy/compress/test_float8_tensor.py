"""FP8 with one scale of a whole weight: the library reads it, joined layers share it."""

from __future__ import annotations

import pytest
import torch
from stood_for import (
    assert_joined_layers_share,
    dequantised_model,
    layers_seen,
    logits_of,
    scales_of,
    stored,
)
from tiny_models import job_for, recipe_data, write_calibration_text, write_llama
from transformers import AutoModelForCausalLM

from taut_deploy.compress import driver
from taut_deploy.compress.formats.registry import weight_format
from taut_deploy.compress.quantize.float8 import Float8TensorSpec, round_fp8
from taut_deploy.compress.train.distil import DistilJob, distil
from taut_deploy.compress.train.settings import TrainSettings
from taut_deploy.models.store import describe_directory
from taut_deploy.recipe import Quantize

SPEC = Float8TensorSpec(torch.float32)


def matrix(seed: int, size: float = 1.0) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)) * size


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """``model/`` (fp32), ``text.txt``, and ``out/``, the model in FP8 by tensor."""
    path = tmp_path_factory.mktemp("room")
    model = write_llama(path / "model")
    text = write_calibration_text(path / "text.txt")
    data = recipe_data(text, scheme="FP8-TENSOR", group_size=None)
    driver.compress(job_for(model, data, path / "out"))
    return path


def test_one_scale_spans_the_weight():
    weight = matrix(0)
    grid = SPEC.fit(weight)
    assert grid.scale.tolist() == [[float(weight.abs().max() / 448)]]
    expected = round_fp8(weight / grid.scale) * grid.scale
    assert torch.equal(grid.round(weight), expected)
    assert torch.equal(grid.encode(weight).dequantize(), expected)
    column = grid.by_column(torch.arange(32).flip(0))
    assert torch.equal(column(0, weight[:, 31]), expected[:, 31])


def test_joined_layers_take_the_scale_of_the_largest():
    small, large = matrix(1, 0.01), matrix(2)
    joined = SPEC.joined([small, large])
    assert torch.equal(joined.fit(small).scale, SPEC.fit(large).scale)
    assert torch.equal(joined.fit(large).scale, SPEC.fit(large).scale)


def test_the_library_reads_what_is_stored():
    from compressed_tensors.compressors import BaseCompressor

    found = weight_format(Quantize(scheme="FP8-TENSOR"), [32], torch.bfloat16)
    codes = found.spec.fit(matrix(3)).encode(matrix(3))
    packed = found.pack(codes)
    assert packed["weight_scale"].shape == (1,)
    library = BaseCompressor.get_value_from_registry("float-quantized")
    read = library.decompress(packed, found.scheme(["Linear"]))["weight"]
    torch.testing.assert_close(read.float(), codes.dequantize(), rtol=2**-8, atol=0)
    assert torch.equal(found.unpack(packed).dequantize(), codes.dequantize())
    assert found.stored_bytes(16, 32) == sum(tensor.nbytes for tensor in packed.values())


def test_joined_layers_share_both_scales(room):
    """vLLM has one of each for them, and would round weights again to the largest."""
    for leaf in ("weight_scale", "input_scale"):
        scales = scales_of(room / "out", leaf)
        assert_joined_layers_share(scales)
        assert len(set(scales.values())) > 2


def test_stock_transformers_computes_what_the_checkpoint_stands_for(room):
    text = room / "text.txt"
    data = recipe_data(text, scheme="FP8-TENSOR", group_size=None)
    request = job_for(room / "model", data, room / "out")
    theirs = logits_of(AutoModelForCausalLM.from_pretrained(room / "out").eval())
    base = logits_of(AutoModelForCausalLM.from_pretrained(room / "model").eval())
    lost = (logits_of(dequantised_model(request)) - base).norm()
    assert 0 < lost < 0.3 * base.norm()
    assert (theirs - logits_of(dequantised_model(request))).norm() < 0.02 * lost


@pytest.mark.parametrize("scheme", ["FP8-TENSOR", "FP8-STATIC"])
def test_the_doctor_knows_schemes_of_fixed_inputs_as_fp8(scheme, room, tmp_path):
    data = recipe_data(room / "text.txt", scheme=scheme, group_size=None, algorithm="rtn")
    driver.compress(job_for(room / "model", data, tmp_path / "out"))
    assert layers_seen(tmp_path / "out")["model.layers.0.mlp.down_proj"][2].name == "FP8"


def test_training_moves_weights_and_leaves_the_scales_that_layers_share(room, tmp_path):
    settings = TrainSettings(
        tokens=8 * 8 * 16, sequence_length=16, batch_size=8, micro_batch=4, held_out=4
    )
    student, teacher = describe_directory(room / "out"), describe_directory(room / "model")
    texts = (str(room / "text.txt"),)
    distil(DistilJob(student, teacher, tmp_path / "out", texts, settings, tmp_path / "cache"))
    for leaf in ("weight_scale", "input_scale"):
        assert scales_of(tmp_path / "out", leaf) == scales_of(room / "out", leaf)
    before, after = stored(room / "out"), stored(tmp_path / "out")
    codes = [name for name in before if name.endswith("down_proj.weight")]
    assert codes
    assert any(not torch.equal(before[name].float(), after[name].float()) for name in codes)
